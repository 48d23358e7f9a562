"""The NRI plugin: it places whole VMs on the CPUs and NUMA nodes of this host, and keeps other containers off theirs.

`assignments.py` decides and touches nothing: read it first. No shim imports this room; a shim asks the running plugin.
"""
