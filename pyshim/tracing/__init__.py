"""Spans of a pod, sent to a receiver of OTLP over HTTP, where `enable_tracing` asks for it.

The room has the queue in the shim (`exporter.py`), the child that speaks HTTP (`child.py`) and the ids by
which spans of several programs join (`ids.py`). `pyshim/model/observation.py` decides what is recorded. A
shim loads this room only when it creates a sandbox that is to be traced. Read `exporter.py` first.
"""
