"""The changes of a running VM when its containers come, go or are updated; refusals for a VM of fixed size.

Target = default + sum over the containers that have not stopped, exact to the end (Kata's rule). A container without a
quota counts its CPU set only when no container has one: the kubelet gives such containers every CPU that is not
reserved for another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HostFacts
from pyshim.model.sizing import SizingRecord, decimal, dimension
from pyshim.model.units import MIB
from pyshim.resources.sizing.plan.static import DYNAMIC, LEAST_VCPUS, base_vcpus, memory_limit, stated, vcpus_limit
from pyshim.resources.sizing.plan.workload import (
    NO_CPU_LIMIT,
    NO_LIMITS,
    NO_MEMORY_LIMIT,
    Workload,
    check_groups,
    cpu_request,
    memory_request,
)

MAX_GROWTH = 48
"""A plugged DIMM is described in memory the guest already has: beyond this many times its size the guest runs out.
Source: Kata's limit for one ACPI memory hotplug."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One container's request; zero for a missing limit."""

    name: str
    vcpus: Fraction
    cpus: frozenset[int]
    memory_bytes: int
    hugepage_bytes: int


class VmSize(msgspec.Struct, frozen=True, kw_only=True):
    """A running VM's size and its limits."""

    boot_vcpus: int
    vcpus: int
    max_vcpus: int
    boot_memory_mib: int
    memory_mib: int
    max_memory_mib: int
    block_mib: int
    """The guest's memory block: all added memory is a multiple of it."""
    free_slots: int
    """DIMMs that can still be plugged; virtio-mem needs none."""
    virtio_mem: bool


class ResizePlan(msgspec.Struct, frozen=True, kw_only=True):
    record: SizingRecord
    """`granted` is what the VM will have; `warnings` what could not be done."""
    vcpus: int
    memory_steps_mib: tuple[int, ...]
    """Sizes of the whole VM, in this order; empty if its memory stays as it is."""


def demand(name: str, resources: Mapping[str, Any]) -> Demand:
    """One container's demand, from its OCI resources. Raises InvalidArgument naming the member that is wrong."""
    check_groups(resources)
    cpu = cpu_request(resources)
    memory_bytes, hugepage_bytes = memory_request(resources)
    return Demand(
        name=name,
        vcpus=cpu.by_quota or cpu.by_shares,
        cpus=cpu.cpus,
        memory_bytes=memory_bytes,
        hugepage_bytes=hugepage_bytes,
    )


def merged(resources: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` after an update, in which a member that is absent, empty or 0 stays as it was (Kata's rule).

    Raises InvalidArgument for an update that is not made of groups.
    """
    check_groups(update)
    result = dict(resources)
    for group, members in update.items():
        if isinstance(members, Mapping):
            changed = {name: value for name, value in members.items() if value}
            result[group] = {**(resources.get(group) or {}), **changed}
        elif members:
            result[group] = members
    return result


def total_vcpus(demands: Iterable[Demand]) -> tuple[Fraction, str]:
    """CPUs of all containers together, and the source of that number."""
    everyone = tuple(demands)
    by_quota = sum((each.vcpus for each in everyone), Fraction(0))
    if by_quota:
        return by_quota, "quotas of the containers"
    union = frozenset[int]().union(*(each.cpus for each in everyone))
    return (Fraction(len(union)), "CPU sets of the containers") if union else (Fraction(0), NO_CPU_LIMIT)


def total_memory_bytes(demands: Iterable[Demand]) -> int:
    return sum(each.memory_bytes + each.hugepage_bytes for each in demands)


def resize_plan(
    vm: VmSize, demands: Sequence[Demand], config: Config, host: HostFacts, pod: Workload = NO_LIMITS
) -> ResizePlan:
    """The VM's size for `demands`: at least its boot size, at most its limits. A warning says what they cut off.

    `pod` is the request of the pod as a whole; the larger of it and the containers' sum counts.
    """
    record = _target(vm, demands, (stated(config), pod), config, host)
    memory_mib, more = record.memory_mib.granted, list[str]()
    if memory_mib < vm.memory_mib and not vm.virtio_mem:
        memory_mib = vm.memory_mib
        more.append(f"memory stays at {memory_mib} MiB: DIMMs are not taken away")
    steps = _steps(vm, memory_mib)
    if steps and not vm.virtio_mem and len(steps) > vm.free_slots:
        steps = steps[: vm.free_slots]
        memory_mib = steps[-1] if steps else vm.memory_mib
    if memory_mib != record.memory_mib.granted:
        stays = memory_mib > record.memory_mib.granted
        limit = "DIMMs, which are not taken away" if stays else "memory slots"
        record = replace(record, memory_mib=replace(record.memory_mib, granted=memory_mib, limited_by=limit))
    return ResizePlan(
        record=record.with_warnings(*_limit_warnings(record), *more),
        vcpus=record.vcpus.granted,
        memory_steps_mib=steps,
    )


def growth_steps(vm: VmSize, target_mib: int) -> tuple[int, ...]:
    """Sizes on the way to `target_mib`, or to the next whole block above it; DIMMs are counted from the boot size."""
    blocks = -(-max(0, target_mib - vm.boot_memory_mib) // vm.block_mib)
    return _steps(vm, vm.boot_memory_mib + blocks * vm.block_mib)


def check_static_update(action: str, vm: VmSize, before: Sequence[Demand], after: Sequence[Demand]) -> None:
    """Raises FailedPrecondition with the numbers when an update exceeds a VM of fixed size. Decreases are allowed.

    CPU sets do not count: the kubelet's static CPU manager gives containers all CPUs that are not exclusive.
    """
    had, want = (sum((each.vcpus for each in demands), Fraction(0)) for demands in (before, after))
    if want > vm.vcpus and want > had:
        raise FailedPrecondition(
            f"{action}: {decimal(want)} CPUs for all containers are more than the "
            f"{vm.vcpus} vCPUs this sandbox was made with, and static_sandbox_resource_mgmt keeps its size"
        )
    had_bytes, want_bytes = total_memory_bytes(before), total_memory_bytes(after)
    if want_bytes > vm.memory_mib * MIB and want_bytes > had_bytes:
        raise FailedPrecondition(
            f"{action}: {decimal(Fraction(want_bytes, MIB))} MiB for all containers are more than the "
            f"{vm.memory_mib} MiB this sandbox was made with, and static_sandbox_resource_mgmt keeps its size"
        )


def _target(
    vm: VmSize, demands: Sequence[Demand], pods: Sequence[Workload], config: Config, host: HostFacts
) -> SizingRecord:
    hypervisor = config.hypervisor
    asked_vcpus, vcpus_source = total_vcpus(demands)
    asked_bytes = total_memory_bytes(demands)
    memory_source = "limits of the containers" if asked_bytes else NO_MEMORY_LIMIT
    for pod in pods if demands else ():  # without containers the pod needs no resources
        if pod.vcpus > asked_vcpus:
            asked_vcpus, vcpus_source = pod.vcpus, pod.vcpus_source
        if pod.total_bytes > asked_bytes:
            asked_bytes, memory_source = pod.total_bytes, pod.memory_source
    most_vcpus = _tighter(vcpus_limit(hypervisor, host), vm.max_vcpus)
    most_mib = _tighter(memory_limit(hypervisor, host), vm.max_memory_mib)
    vcpus = dimension(
        base=base_vcpus(hypervisor, host),
        base_source="default_vcpus",
        requested=asked_vcpus,
        requested_source=vcpus_source,
        unit=1,
        least=(max(LEAST_VCPUS, vm.boot_vcpus), "what the VM booted with"),
        most=most_vcpus,
    )
    # Blocks are counted from the boot size: the guest's hotplug region starts on a block of its own.
    added = dimension(
        base=Fraction(hypervisor.default_memory_mib - vm.boot_memory_mib),
        base_source="default_memory",
        requested=Fraction(asked_bytes, MIB),
        requested_source=memory_source,
        unit=vm.block_mib,
        least=(0, "what the VM booted with"),
        most=(max(0, most_mib[0] - vm.boot_memory_mib), most_mib[1]),
    )
    memory = replace(
        added,
        base=Fraction(hypervisor.default_memory_mib),
        exact=added.exact + vm.boot_memory_mib,
        rounded=added.rounded + vm.boot_memory_mib,
        granted=added.granted + vm.boot_memory_mib,
    )
    return SizingRecord(policy=DYNAMIC, vcpus=vcpus, memory_mib=memory, warnings=())


def _tighter(limit: tuple[int, str], vm_maximum: int) -> tuple[int, str]:
    return limit if limit[0] <= vm_maximum else (vm_maximum, "what the VM was made for")


def _steps(vm: VmSize, target_mib: int) -> tuple[int, ...]:
    """Sizes on the way to `target_mib`; a growing VM takes at most MAX_GROWTH times its size at once (DIMMs only)."""
    steps: list[int] = []
    now = vm.memory_mib
    while now != target_mib:
        step = target_mib - now
        if step > 0 and not vm.virtio_mem:
            step = min(step, max(vm.block_mib, now * MAX_GROWTH // vm.block_mib * vm.block_mib))
        now += step
        steps.append(now)
    return tuple(steps)


def _limit_warnings(record: SizingRecord) -> tuple[str, ...]:
    return tuple(
        f"{each.rounded} {unit} wanted, {each.granted} given: limited by {each.limited_by}"
        for each, unit in ((record.vcpus, "vCPUs"), (record.memory_mib, "MiB"))
        if each.granted < math.ceil(each.exact)
    )
