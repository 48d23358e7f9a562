"""Compares what Kubernetes reserves for a pod with what its VM takes, policy by policy."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.model.kind import ContainerKind
from pyshim.model.sizing import Dimension, SizingRecord, decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.pod_size import CPU, HUGEPAGES, MEMORY, PodSizing
from pyshim.resources.sizing.plan.resize import Demand, VmSize, resize_plan
from pyshim.resources.sizing.plan.static import (
    DYNAMIC,
    OVERHEAD,
    POLICIES,
    boot_size,
    headroom,
    is_resizable,
    least_memory_mib,
    memory_unit_mib,
    static_size,
)
from pyshim.resources.sizing.plan.workload import Workload, workload

BLOCK_MIB = 128
"""Memory block of x86-64 guests below 64 GiB, in which a running VM grows."""
HOST_SIDE = "host side"
"""The name of the part for VMM, file server and shim, beside guest RAM."""


class Disagreement(StrEnum):
    """Kinds of difference between a pod's VM and Kubernetes' figures."""

    BASE_NOT_COVERED = "base not covered"
    """Limits are stated; the VM adds its base, and the overhead is smaller than that."""
    REQUESTS_BELOW_LIMITS = "requests below limits"
    """The scheduler counts the requests, the VM is sized by the limits."""
    DEFAULTS_NOT_RESERVED = "defaults not reserved"
    """No memory limit is stated; the VM has the default memory, Kubernetes counts requests + overhead."""
    MORE_THAN_THE_NODE = "more than the node"
    """Base + workload exceed what the node has."""
    CGROUP_BELOW_VM = "cgroup below VM"
    """The guest may use more than the pod's cgroup allows, and then the host kills the VM."""
    CONTAINER_WITHOUT_LIMIT = "container without limit"
    """The VM is sized by the limits of the others."""
    HUGE_PAGES_NOT_REPORTED = "huge pages not reported"
    """Container runtimes do not report a pod's huge pages: the VM has no memory for them."""
    VM_BELOW_REQUESTS = "VM below requests"
    """The node reserves what the pod requests; the VM, sized by limits, has less."""
    VOLUMES_ABOVE_VM = "volumes above VM"
    """Volumes of medium Memory may take more than the VM has."""


LETTERS = dict(zip(Disagreement, "abcdefghi", strict=True))


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    kind: Disagreement
    text: str
    """One sentence with the numbers."""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """A RuntimeClass's podFixed."""

    cpus: Fraction = Fraction(0)
    memory_mib: Fraction = Fraction(0)


class OverheadPart(Overhead, frozen=True, kw_only=True):
    """A part of a RuntimeClass's podFixed, and where it comes from."""

    name: str


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    record: SizingRecord
    findings: tuple[Mismatch, ...]
    pod_fixed: Overhead
    """With this overhead Kubernetes counts what this pod's VM takes, as far as requests equal limits."""
    class_fixed: Overhead
    """The least overhead that covers the VM of every pod that states its limits."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    pod: PodSizing
    host_side_mib: int
    in_force: str
    """The policy of the configuration: a static one, or `dynamic`."""
    views: tuple[PolicyView, ...]


def explain_pod(pod: PodSizing, config: Config, host: HostFacts, *, host_side_mib: int) -> Explanation:
    """`pod`'s VM on `host`: by both static policies and, if it grows with its containers, once it has grown.

    `host_side_mib` is what VMM and servers take beside guest RAM.
    """
    asked = workload(ContainerKind.POD_SANDBOX, pod.sandbox_annotations(), {})
    records = _records(asked, config, host)
    # An overhead belongs to a class, not to a node: its figures come from a VM that this node does not limit.
    roomy = _records(asked, config, unbounded(host))
    return Explanation(
        pod=pod,
        host_side_mib=host_side_mib,
        in_force=DYNAMIC if DYNAMIC in records else config.runtime.sizing_policy,
        views=tuple(
            PolicyView(
                record=record,
                findings=tuple(_findings(pod, record, host, host_side_mib)),
                pod_fixed=_pod_fixed(pod, roomy.get(policy, record), host_side_mib),
                class_fixed=class_fixed(config, policy, host_side_mib),
            )
            for policy, record in records.items()
        ),
    )


def booted(pod: PodSizing, config: Config, host: HostFacts) -> SizingRecord:
    """The size with which `pod`'s VM boots on `host`, as the shim decides it from the pod's annotations."""
    if is_resizable(config):
        return boot_size(config, host)
    return static_size(config, host, workload(ContainerKind.POD_SANDBOX, pod.sandbox_annotations(), {}))


def _records(asked: Workload, config: Config, host: HostFacts) -> dict[str, SizingRecord]:
    """The VM's size by policy; `dynamic` only if it grows."""
    records = {}
    for policy in POLICIES:
        chosen = replace(config, runtime=replace(config.runtime, sizing_policy=policy))
        records[policy] = static_size(chosen, host, asked)
    grown = _grown(asked, config, host)
    return records if grown is None else {**records, DYNAMIC: grown}


def _grown(asked: Workload, config: Config, host: HostFacts) -> SizingRecord | None:
    """The VM's size once all containers run; None when it never grows."""
    boot = boot_size(config, host)
    vcpus, memory_mib = boot.vcpus.granted, boot.memory_mib.granted
    room = headroom(config, host, boot)
    if (room.max_vcpus, room.max_memory_mib) == (vcpus, memory_mib):
        return None
    vm = VmSize(
        boot_vcpus=vcpus,
        vcpus=vcpus,
        max_vcpus=room.max_vcpus,
        boot_memory_mib=memory_mib,
        memory_mib=memory_mib,
        max_memory_mib=room.max_memory_mib,
        block_mib=BLOCK_MIB,
        free_slots=room.memory_slots,
        virtio_mem=config.hypervisor.enable_virtio_mem,
    )
    containers = Demand(
        name="all",
        vcpus=asked.vcpus,
        cpus=frozenset(),
        memory_bytes=asked.memory_bytes,
        hugepage_bytes=asked.hugepage_bytes,
    )
    return resize_plan(vm, (containers,), config, host).record


class _Side(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension of the comparison, in the unit messages use."""

    name: str
    unit: str
    limit: Fraction
    request: Fraction
    overhead: Fraction
    vm: Fraction
    """The VM's share of the node. 0 CPUs without a limit: such vCPUs use what others leave."""
    vm_text: str

    @property
    def counted(self) -> Fraction:
        """The greater of limit and request. A request is above the limit only if a container has no limit."""
        return max(self.limit, self.request)


def _sides(pod: PodSizing, record: SizingRecord, host_side_mib: int) -> tuple[_Side, _Side]:
    limits, requests = pod.effective_limits(), pod.effective_requests()

    def of(amounts: dict[str, Fraction], name: str, unit: int = 1) -> Fraction:
        return amounts.get(name, Fraction(0)) / unit

    overhead = dict(pod.overhead)
    # Rounding up to whole vCPUs takes nothing from the node: the quota of the pod's cgroup limits all of them together.
    cpus = min(record.vcpus.exact, Fraction(record.vcpus.granted))
    # The kubelet raises a quota below 10 milliCPU to that; the pod's cgroup gets the raised one, too.
    cpus -= max(Fraction(0), record.vcpus.requested - max(of(limits, CPU), of(requests, CPU)))
    ram_mib = record.memory_mib.granted
    return (
        _Side(
            name="CPU",
            unit="CPUs",
            limit=of(limits, CPU),
            request=of(requests, CPU),
            overhead=of(overhead, CPU),
            vm=cpus if of(limits, CPU) else Fraction(0),
            vm_text=f"the VM is sized for {decimal(cpus)} CPU{'' if cpus == 1 else 's'}",
        ),
        _Side(
            name="memory",
            unit="MiB",
            limit=of(limits, MEMORY, MIB),
            request=of(requests, MEMORY, MIB),
            overhead=of(overhead, MEMORY, MIB),
            vm=Fraction(ram_mib + host_side_mib),
            vm_text=f"the VM takes {ram_mib} + {host_side_mib} MiB (guest RAM + host side)",
        ),
    )


def _findings(pod: PodSizing, record: SizingRecord, host: HostFacts, host_side_mib: int) -> Iterator[Mismatch]:
    sides = _sides(pod, record, host_side_mib)
    for side in sides:
        yield from _accounting(side)
    for side, dimension, has in zip(
        sides, (record.vcpus, record.memory_mib), (host.cpu_count, host.memory_mib), strict=True
    ):
        if has and dimension.rounded > has:
            text = f"{_arithmetic(dimension)} {side.unit} are more than the {has} of the node"
            yield Mismatch(kind=Disagreement.MORE_THAN_THE_NODE, text=text)
        if dimension.granted < side.request:
            text = f"{side.name}: the pod requests {decimal(side.request)} {side.unit}, the VM has {dimension.granted}"
            yield Mismatch(kind=Disagreement.VM_BELOW_REQUESTS, text=text)
    allowed = pod.cgroup_limit(MEMORY)
    memory = sides[1]
    if allowed is not None and memory.vm * MIB > allowed:
        text = f"{memory.vm_text}, the pod's cgroup allows {decimal(allowed / MIB)}: the host kills a VM that uses more"
        yield Mismatch(kind=Disagreement.CGROUP_BELOW_VM, text=text)
    if pod.memory_volumes > record.memory_mib.granted * MIB:
        text = (
            f"volumes of medium Memory may hold {decimal(pod.memory_volumes / MIB)} MiB, "
            f"the VM has {record.memory_mib.granted}"
        )
        yield Mismatch(kind=Disagreement.VOLUMES_ABOVE_VM, text=text)
    yield from _incomplete(pod, sides, record)


def _accounting(side: _Side) -> Iterator[Mismatch]:
    seen = side.counted + side.overhead
    if side.vm > seen:
        kind = Disagreement.BASE_NOT_COVERED if side.limit else Disagreement.DEFAULTS_NOT_RESERVED
        words = "limits" if side.limit and side.limit >= side.request else "requests"
        text = (
            f"{side.vm_text}; {words} + overhead are {decimal(side.counted)} + {decimal(side.overhead)} "
            f"= {decimal(seen)} {side.unit}: {decimal(side.vm - seen)} are not accounted for"
        )
        yield Mismatch(kind=kind, text=text)
    if side.limit and side.request < side.limit:
        text = (
            f"{side.name}: the scheduler counts {decimal(side.request)} {side.unit}, "
            f"the VM is sized by {decimal(side.limit)}"
        )
        yield Mismatch(kind=Disagreement.REQUESTS_BELOW_LIMITS, text=text)


def _incomplete(pod: PodSizing, sides: tuple[_Side, _Side], record: SizingRecord) -> Iterator[Mismatch]:
    for side, name, dimension in zip(sides, (CPU, MEMORY), (record.vcpus, record.memory_mib), strict=True):
        without = pod.unlimited(name)
        by_requests = side.limit < side.request <= dimension.requested
        if side.limit and without and not by_requests:
            text = f"{side.name}: no limit for {', '.join(without)}; the VM is sized by the limits of the others"
            yield Mismatch(kind=Disagreement.CONTAINER_WITHOUT_LIMIT, text=text)
    pages = {name: amount for name, amount in pod.effective_limits().items() if name.startswith(HUGEPAGES) and amount}
    for name, amount in sorted(pages.items()):
        text = f"{name}: {decimal(amount / MIB)} MiB are reserved on the node and not added to the VM"
        yield Mismatch(kind=Disagreement.HUGE_PAGES_NOT_REPORTED, text=text)


def _arithmetic(dimension: Dimension) -> str:
    return f"{decimal(dimension.base)} + {decimal(dimension.requested)} = {decimal(dimension.exact)}"


def _pod_fixed(pod: PodSizing, record: SizingRecord, host_side_mib: int) -> Overhead:
    cpu, memory = (max(Fraction(0), side.vm - side.counted) for side in _sides(pod, record, host_side_mib))
    return Overhead(cpus=cpu, memory_mib=memory)


def policy_in_force(config: Config) -> str:
    """The policy that sizes the VMs of `config`."""
    return DYNAMIC if is_resizable(config) else config.runtime.sizing_policy


def class_fixed(config: Config, policy: str, host_side_mib: int) -> Overhead:
    """The sum of `class_parts`."""
    return total(class_parts(config, policy, host_side_mib))


def total(parts: Sequence[OverheadPart]) -> Overhead:
    return Overhead(
        cpus=sum((each.cpus for each in parts), Fraction(0)),
        memory_mib=sum((each.memory_mib for each in parts), Fraction(0)),
    )


def class_parts(config: Config, policy: str, host_side_mib: int) -> tuple[OverheadPart, ...]:
    """Base, the most that rounding adds to memory, and the host side; never below the smallest VM's.

    A remote VM has the host side only.
    """
    beside = OverheadPart(name=HOST_SIDE, memory_mib=Fraction(host_side_mib))
    if config.is_remote:
        return (beside,)
    hypervisor = config.hypervisor
    by_overhead = policy == OVERHEAD
    base_mib = hypervisor.overhead_memory_mib if by_overhead else hypervisor.default_memory_mib
    unit_mib = BLOCK_MIB if policy == DYNAMIC else memory_unit_mib(hypervisor)
    least_mib = least_memory_mib(hypervisor, by_overhead=by_overhead)
    base = OverheadPart(
        name="overhead_*" if by_overhead else "default_*",
        cpus=hypervisor.overhead_vcpus if by_overhead else hypervisor.default_vcpus,
        memory_mib=Fraction(base_mib),
    )
    more_mib = Fraction(max(unit_mib, least_mib - base_mib))
    why = f"up to the smallest VM, {least_mib} MiB" if more_mib > unit_mib else f"rounding up to {unit_mib} MiB"
    return (base, OverheadPart(name=why, memory_mib=more_mib), beside)
