"""Orchestration: one sandbox, its containers and their processes, from Create to nothing left.

Async, no protobuf, no syscalls: guest, host and hypervisor are reached through the protocols of `model/seams.py` and
`hypervisors/base.py`. Read `sandbox.py` first, then `container.py` and `process.py`; `plan` decides, without doing.
"""
