"""Choosing a cloud instance for a pod, as a library of its own: it imports nothing of the project.

For makers of remote VMs: give `select` a table of instance types and what a pod needs, and get the smallest type
that has it, or the reason why none does. `need.py` reads the need from the annotations a shim sends with CreateVM.
"""

from pyshim.instances.need import Need, need_of
from pyshim.instances.select import Choice, InstanceType, NoInstance, select
from pyshim.instances.table import InvalidTable, read_table

__all__ = ["Choice", "InstanceType", "InvalidTable", "Need", "NoInstance", "need_of", "read_table", "select"]
