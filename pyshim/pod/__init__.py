"""Orchestration: one sandbox, its containers and their processes, from Create to nothing left.

Async, no protobuf, no syscalls: the guest's agent, the host and the hypervisor are reached through the protocols in
`seams.py`. Read `sandbox.py` first, then `container.py`, `process.py`.
"""
