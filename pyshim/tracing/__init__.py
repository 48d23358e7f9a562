"""Spans of a pod, sent to a receiver of OTLP over HTTP, where `enable_tracing` asks for it.

Here live the queue in the shim (`exporter.py`), the child that speaks HTTP (`child.py`, `request.py`) and the ids by
which spans of several programs join (`ids.py`). What is recorded is decided elsewhere (`pyshim/model/trace.py`). A shim
loads this room when it creates a sandbox that is to be traced, and no other time. Read `exporter.py` first.
"""
