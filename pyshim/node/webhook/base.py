"""Which part of a pod's requests its shim cannot see, and the base of the VM that makes up for it.

A shim learns a pod's limits from its container runtime, and adds them to the VM's base. Of requests it learns nothing.
"""

import math
from fractions import Fraction

from pyshim.config.annotations import HYPERVISOR_PREFIX
from pyshim.model.config import Config
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.resources.sizing.plan.static import OVERHEAD, is_resizable

DEFAULT_VCPUS, DEFAULT_MEMORY = f"{HYPERVISOR_PREFIX}default_vcpus", f"{HYPERVISOR_PREFIX}default_memory"
_MILLI = Fraction(1, 1000)
"""CPUs: the unit in which Kubernetes counts them."""


def base_annotations(pod: PodSizing, config: Config, *, host_side_mib: int) -> dict[str, str]:
    """The annotations that make the VM as large as the pod's requests; empty where its limits suffice.

    The VM then has request + base, and never more than Kubernetes reserves on the node, which is request + overhead
    (less the host side, for memory): a shim refuses a base above the node's CPUs. Empty, too, for what no annotation
    can change: under policy `overhead` the base of a pod with a limit is `overhead_*`.
    """
    requests, limits = pod.effective_requests(), pod.effective_limits()
    hypervisor = config.hypervisor
    by_overhead = config.runtime.sizing_policy == OVERHEAD and not is_resizable(config)

    def base(name: str, unit: Fraction, *, default: Fraction, overhead: Fraction, beside: int = 0) -> int:
        """In whole units; 0 where the file's own will do."""
        limit = limits.get(name, Fraction(0)) / unit
        unseen = requests.get(name, Fraction(0)) / unit - limit
        if unseen <= 0 or (by_overhead and limit):
            return 0
        reserved = max(Fraction(0), pod.overhead.get(name, Fraction(0)) / unit - beside)
        wanted = max(math.floor(unseen + min(overhead if by_overhead else default, reserved)), math.ceil(unseen))
        return wanted if wanted > default else 0

    milli = base(CPU, _MILLI, default=hypervisor.default_vcpus / _MILLI, overhead=hypervisor.overhead_vcpus / _MILLI)
    mib = base(
        MEMORY,
        Fraction(MIB),
        default=Fraction(hypervisor.default_memory_mib),
        overhead=Fraction(hypervisor.overhead_memory_mib),
        beside=host_side_mib,
    )
    found = {DEFAULT_VCPUS: decimal(milli * _MILLI)} if milli else {}
    return {**found, DEFAULT_MEMORY: str(mib)} if mib else found
