"""The NRI plugin: it places whole VMs on this host's CPUs and NUMA nodes, and keeps other containers off these CPUs.

Read `assignments.py` first: it decides, with `capacity.py` and `choice.py`, and is pure. No shim imports this room; a
shim asks the running plugin.
"""
