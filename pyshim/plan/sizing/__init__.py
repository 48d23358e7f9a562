"""How large a sandbox's VM is, why, and whether it fits: pure arithmetic on exact fractions, kept in a record.

No file is read here and nothing is rounded before the last step. `static.py` is the place to start: policies and
limits. `workload.py` says what a pod asks for, `record.py` is what is kept of the decision, `capacity.py` compares it
with the host, `resize.py` decides changes of a running VM, `pod.py` and `agreement.py` are Kubernetes' own arithmetic
and where it and the VM disagree.
"""

from pyshim.plan.sizing.capacity import capacity_check
from pyshim.plan.sizing.record import Dimension, SizingRecord
from pyshim.plan.sizing.static import Headroom, boot_size, headroom, is_resizable, static_size
from pyshim.plan.sizing.workload import MIB, Workload, workload

__all__ = [
    "MIB",
    "Dimension",
    "Headroom",
    "SizingRecord",
    "Workload",
    "boot_size",
    "capacity_check",
    "headroom",
    "is_resizable",
    "static_size",
    "workload",
]
