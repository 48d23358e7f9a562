"""The size of a sandbox's VM, its reasons and its fit: pure arithmetic on exact fractions, saved in a record.

No file is read here and nothing is rounded before the last step. `static.py` is the place to start: policies and
limits. `workload.py` says what a pod asks for, `capacity.py` compares the result with the host, `resize.py` decides
changes of a running VM. `model/sizing.py` is the record of a decision; Kubernetes' arithmetic is in `node/kubernetes`.
"""

from pyshim.resources.sizing.plan.capacity import capacity_check
from pyshim.resources.sizing.plan.static import Headroom, boot_size, headroom, is_resizable, static_size, template_size
from pyshim.resources.sizing.plan.workload import Workload, workload

__all__ = [
    "Headroom",
    "Workload",
    "boot_size",
    "capacity_check",
    "headroom",
    "is_resizable",
    "static_size",
    "template_size",
    "workload",
]
