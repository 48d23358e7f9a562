"""Nouns: frozen data and state tables every other room speaks in.

Pure: no I/O, no asyncio, no protobuf, nothing of ours outside this package. Start with `task.py` (what containerd
asks), `plans.py` (what a pod is made of) and `ledger.py` (what must be undone).
"""
