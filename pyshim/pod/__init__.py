"""One pod's life: its sandbox, containers and processes, from Create until nothing is left.

Async, no protobuf, no system calls: guest, host and hypervisor are reached through the protocols of `model/seams.py`
and `hypervisors/base.py`. Read `pod.py` first, then `life.py`, `sandbox.py`, `births.py`, `container.py` and
`process.py`. `plan` decides, and acts on nothing.
"""
