"""The NRI plugin: it places whole VMs on this host's CPUs and NUMA nodes, and keeps other containers off these CPUs.

Read `assignments.py` first: it decides, and is pure. No shim imports this room; a shim asks the running plugin.
"""
