"""The size a VM boots with: base plus workload for each dimension, one rounding, then the limits.

Policy `sum` (Kata's Go runtime): `default_*` plus what the workload states. Policy `overhead` (Kata's runtime-rs, but
dimension by dimension): `overhead_*` plus the workload where it states a limit, `default_*` where it states none.
"""

from fractions import Fraction

import msgspec
from msgspec.structs import replace

from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.host_facts import HostFacts
from pyshim.model.sizing import SizingRecord, dimension
from pyshim.model.units import HUGEPAGE_MIB, MIB
from pyshim.resources.sizing.plan.workload import NO_CPU_LIMIT, NO_LIMITS, NO_MEMORY_LIMIT, Workload

SUM, OVERHEAD = "sum", "overhead"
POLICIES = (SUM, OVERHEAD)
DYNAMIC = "dynamic"
LEAST_VCPUS = 1
LEAST_MEMORY_MIB = 256
"""The smallest VM Kata's Go runtime allows; a `default_memory` below it says that this guest boots with less."""
LEAST_OVERHEAD_MEMORY_MIB = 128
"""The smallest VM, MiB, where `overhead_memory` is the base. Our guest runs a container in it, under emulation; smaller
sizes were not tried."""
_UNKNOWN = 1 << 40


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """The limits a running VM can grow to; its boot size and no slots for a VM of fixed size."""

    max_vcpus: int
    max_memory_mib: int
    memory_slots: int


def static_size(config: Config, host: HostFacts, request: Workload) -> SizingRecord:
    """The size of a VM that is never resized, by `sizing_policy`: for `request`, or for `requested_*` if that is more.

    Each dimension by itself. `requested_*` makes no VM smaller.
    """
    found = _size(config, host, request)
    own = stated(config)
    by_own = _size(config, host, own)
    if own.vcpus and by_own.vcpus.exact > found.vcpus.exact:
        found = replace(found, vcpus=by_own.vcpus)
    if own.memory_bytes and by_own.memory_mib.exact > found.memory_mib.exact:
        found = replace(found, memory_mib=by_own.memory_mib)
    return found


def stated(config: Config) -> Workload:
    """The request that the configuration states: `requested_*`, which the admission webhook writes for a pod."""
    hypervisor = config.hypervisor
    return Workload(
        vcpus=hypervisor.requested_vcpus,
        vcpus_source="requested_vcpus" if hypervisor.requested_vcpus else NO_CPU_LIMIT,
        memory_bytes=hypervisor.requested_memory_mib * MIB,
        memory_source="requested_memory" if hypervisor.requested_memory_mib else NO_MEMORY_LIMIT,
    )


def _size(config: Config, host: HostFacts, request: Workload) -> SizingRecord:
    by_overhead = config.runtime.sizing_policy == OVERHEAD
    hypervisor = config.hypervisor
    cpu_overhead = by_overhead and request.vcpus > 0
    memory_overhead = by_overhead and request.memory_bytes > 0
    least_mib = least_memory_mib(hypervisor, by_overhead=memory_overhead)
    return SizingRecord(
        policy=config.runtime.sizing_policy,
        vcpus=dimension(
            base=hypervisor.overhead_vcpus if cpu_overhead else base_vcpus(hypervisor, host),
            base_source="overhead_vcpus" if cpu_overhead else "default_vcpus",
            requested=request.vcpus,
            requested_source=request.vcpus_source,
            unit=1,
            least=(LEAST_VCPUS, "the smallest VM, 1 vCPU"),
            most=vcpus_limit(hypervisor, host),
        ),
        memory_mib=dimension(
            base=Fraction(hypervisor.overhead_memory_mib if memory_overhead else hypervisor.default_memory_mib),
            base_source="overhead_memory" if memory_overhead else "default_memory",
            requested=Fraction(request.total_bytes, MIB),
            requested_source=request.memory_source,
            unit=memory_unit_mib(hypervisor),
            least=(least_mib, f"the smallest VM, {least_mib} MiB"),
            most=memory_limit(hypervisor, host),
        ),
        warnings=request.warnings,
    )


def boot_size(config: Config, host: HostFacts, request: Workload = NO_LIMITS) -> SizingRecord:
    """The size a VM boots with when it is resized later: the defaults, whatever the policy.

    If its machine plugs no vCPUs, it has those of `request` from the start.
    """
    sized = _size(config, host, NO_LIMITS)
    vcpus = sized.vcpus if config.hypervisor.machine.plugs_vcpus else static_size(config, host, request).vcpus
    return SizingRecord(policy=DYNAMIC, vcpus=vcpus, memory_mib=sized.memory_mib, warnings=())


def template_size(config: Config, host: HostFacts) -> SizingRecord:
    """The size that VMs of a template begin with: few of the configuration's VMs are smaller."""
    hypervisor = config.hypervisor
    if config.runtime.sizing_policy == OVERHEAD and not is_resizable(config):
        memory_mib = min(LEAST_MEMORY_MIB, hypervisor.default_memory_mib)
        hypervisor = replace(hypervisor, default_vcpus=Fraction(LEAST_VCPUS), default_memory_mib=memory_mib)
    return boot_size(replace(config, hypervisor=hypervisor), host)


def is_resizable(config: Config) -> bool:
    """True if the VM boots at the defaults and follows its containers; else it gets its size before it boots.

    Confidential guests and microvm keep their size: they have no hotplug of CPUs and memory. Where only memory can be
    plugged, the VM boots with the vCPUs that its workload states.
    """
    hypervisor = config.hypervisor
    is_fixed = config.runtime.static_sandbox_resource_mgmt or hypervisor.confidential_guest
    return not is_fixed and hypervisor.machine.is_pci


def headroom(config: Config, host: HostFacts, record: SizingRecord) -> Headroom:
    """The VM's limits of growth; its boot size where it is not resized."""
    vcpus, memory_mib = record.vcpus.granted, record.memory_mib.granted
    if not is_resizable(config):
        return Headroom(max_vcpus=vcpus, max_memory_mib=memory_mib, memory_slots=0)
    most_vcpus = maximum_vcpus(config.hypervisor, host) if config.hypervisor.machine.plugs_vcpus else vcpus
    return Headroom(
        max_vcpus=max(vcpus, most_vcpus),
        max_memory_mib=max(memory_mib, maximum_memory_mib(config.hypervisor, host)),
        memory_slots=config.hypervisor.memory_slots,
    )


def base_vcpus(hypervisor: HypervisorConfig, host: HostFacts) -> Fraction:
    """`default_vcpus`; a negative number means the host's CPUs."""
    return Fraction(host.cpu_count) if hypervisor.default_vcpus < 0 else hypervisor.default_vcpus


def maximum_vcpus(hypervisor: HypervisorConfig, host: HostFacts) -> int:
    """`default_maxvcpus`, never above the host's CPUs (0 means those)."""
    return min(hypervisor.default_maxvcpus or host.cpu_count, host.cpu_count)


def maximum_memory_mib(hypervisor: HypervisorConfig, host: HostFacts) -> int:
    """`default_maxmemory`, never above the host's memory (0 means that). No limit where neither is known."""
    known = host.memory_mib or _UNKNOWN
    return min(hypervisor.default_maxmemory_mib or known, known)


def vcpus_limit(hypervisor: HypervisorConfig, host: HostFacts) -> tuple[int, str]:
    """The most vCPUs a VM gets, and the source of that limit."""
    most = maximum_vcpus(hypervisor, host)
    if most == hypervisor.default_maxvcpus:
        return most, "default_maxvcpus"
    return most, f"the CPUs of cgroup '{host.cpu_cgroup}'" if host.cpu_cgroup else "the host's CPUs"


def memory_limit(hypervisor: HypervisorConfig, host: HostFacts) -> tuple[int, str]:
    """The most MiB a VM gets, and the source of that limit."""
    most = maximum_memory_mib(hypervisor, host)
    return most, "default_maxmemory" if most == hypervisor.default_maxmemory_mib else "the host's memory"


def least_memory_mib(hypervisor: HypervisorConfig, *, by_overhead: bool) -> int:
    """The memory of the smallest VM, whose base is `overhead_memory` or `default_memory`."""
    return min(LEAST_OVERHEAD_MEMORY_MIB if by_overhead else LEAST_MEMORY_MIB, hypervisor.default_memory_mib)


def memory_unit_mib(hypervisor: HypervisorConfig) -> int:
    """Guest RAM is a multiple of this: one page of what backs it, in whole MiB.

    The capacity check refuses a VM that does not fit a larger default page.
    """
    return HUGEPAGE_MIB if hypervisor.enable_hugepages else 1
