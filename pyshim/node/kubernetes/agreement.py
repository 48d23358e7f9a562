"""Compares what Kubernetes reserves for a pod with what its VM takes, policy by policy."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from fractions import Fraction

import msgspec

from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.model.sizing import Dimension, SizingRecord, decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.overhead import Overhead, class_overhead
from pyshim.node.kubernetes.pod_size import CPU, HUGEPAGES, MEMORY, PodSizing
from pyshim.node.kubernetes.pod_vm import policy_in_force, sizes_by_policy


class Disagreement(StrEnum):
    """Kinds of difference between a pod's VM and Kubernetes' figures."""

    BASE_NOT_COVERED = "base not covered"
    """Limits are stated; the VM adds its base, which is more than the overhead."""
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
    """The VM, sized by limits, has less than the pod requests."""
    VOLUMES_ABOVE_VM = "volumes above VM"
    """Volumes of medium Memory may take more than the VM has."""


LETTERS = dict(zip(Disagreement, "abcdefghi", strict=True))
"""The letters of docs/SIZING.md."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Disagreement
    text: str
    """One sentence with the numbers."""


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """The pod's VM by one sizing policy, compared with Kubernetes' figures."""

    record: SizingRecord
    findings: tuple[Finding, ...]
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

    @property
    def view_in_force(self) -> PolicyView:
        return next(view for view in self.views if view.record.policy == self.in_force)


def explain_pod(pod: PodSizing, config: Config, host: HostFacts, *, host_side_mib: int) -> Explanation:
    """`pod`'s VM on `host`: by both static policies and, if it grows with its containers, once it has grown.

    `host_side_mib` is what VMM and servers take beside guest RAM.
    """
    # An overhead belongs to a class, not to a node: its figures come from a VM that this node does not limit.
    unlimited = sizes_by_policy(pod, config, unbounded(host))
    return Explanation(
        pod=pod,
        host_side_mib=host_side_mib,
        in_force=policy_in_force(config),
        views=tuple(
            PolicyView(
                record=record,
                findings=tuple(_findings(pod, record, host, host_side_mib)),
                pod_fixed=_pod_fixed(pod, unlimited[policy], host_side_mib),
                class_fixed=class_overhead(config, policy, host_side_mib),
            )
            for policy, record in sizes_by_policy(pod, config, host).items()
        ),
    )


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """CPU or memory of a pod and of its VM, in the unit that messages use."""

    resource: str
    """Kubernetes' name of it."""
    name: str
    unit: str
    limit: Fraction
    request: Fraction
    overhead: Fraction
    vm: Fraction
    """The VM's share of the node. 0 CPUs without a limit: such vCPUs use what others leave."""
    vm_text: str
    dimension: Dimension
    """The arithmetic of the VM's size."""

    @property
    def counted(self) -> Fraction:
        """The greater of limit and request. A request is above the limit only if a container has no limit."""
        return max(self.limit, self.request)


def _figures(pod: PodSizing, record: SizingRecord, host_side_mib: int) -> tuple[_Figures, _Figures]:
    """The figures of CPU and of memory."""
    limits, requests = pod.effective_limits(), pod.effective_requests()

    def of(amounts: Mapping[str, Fraction], name: str, unit: int = 1) -> Fraction:
        return amounts.get(name, Fraction(0)) / unit

    # Rounding up to whole vCPUs takes nothing from the node: the quota of the pod's cgroup limits all of them together.
    cpus = min(record.vcpus.exact, Fraction(record.vcpus.granted))
    # The kubelet raises a quota below 10 milliCPU to that; the pod's cgroup gets the raised one, too.
    cpus -= max(Fraction(0), record.vcpus.requested - max(of(limits, CPU), of(requests, CPU)))
    cpu_limit = of(limits if pod.has_quotas else requests, CPU)  # without quotas a VM is sized by requests
    ram_mib = record.memory_mib.granted
    return (
        _Figures(
            resource=CPU,
            name="CPU",
            unit="CPUs",
            limit=cpu_limit,
            request=of(requests, CPU),
            overhead=of(pod.overhead, CPU),
            vm=cpus if cpu_limit else Fraction(0),
            vm_text=f"the VM is sized for {decimal(cpus)} CPU{'' if cpus == 1 else 's'}",
            dimension=record.vcpus,
        ),
        _Figures(
            resource=MEMORY,
            name="memory",
            unit="MiB",
            limit=of(limits, MEMORY, MIB),
            request=of(requests, MEMORY, MIB),
            overhead=of(pod.overhead, MEMORY, MIB),
            vm=Fraction(ram_mib + host_side_mib),
            vm_text=f"the VM takes {ram_mib} + {host_side_mib} MiB (guest RAM + host side)",
            dimension=record.memory_mib,
        ),
    )


def _pod_fixed(pod: PodSizing, record: SizingRecord, host_side_mib: int) -> Overhead:
    cpu, memory = (max(Fraction(0), each.vm - each.counted) for each in _figures(pod, record, host_side_mib))
    return Overhead(cpus=cpu, memory_mib=memory)


def _findings(pod: PodSizing, record: SizingRecord, host: HostFacts, host_side_mib: int) -> Iterator[Finding]:
    figures = _figures(pod, record, host_side_mib)
    for each in figures:
        yield from _scheduling(each)
    for each, available in zip(figures, (host.cpu_count, host.memory_mib), strict=True):
        yield from _vm_size(each, available)
    yield from _memory_limits(pod, record, figures[1])
    for each in figures:
        yield from _unlimited(each, pod.unlimited(each.resource))
    yield from _huge_pages(pod, record)


def _scheduling(figures: _Figures) -> Iterator[Finding]:
    """The VM's share of the node against what the scheduler counts."""
    seen = figures.counted + figures.overhead
    if figures.vm > seen:
        kind = Disagreement.BASE_NOT_COVERED if figures.limit else Disagreement.DEFAULTS_NOT_RESERVED
        words = "limits" if figures.limit and figures.limit >= figures.request else "requests"
        text = (
            f"{figures.vm_text}; {words} + overhead are {decimal(figures.counted)} + {decimal(figures.overhead)} "
            f"= {decimal(seen)} {figures.unit}: {decimal(figures.vm - seen)} are not accounted for"
        )
        yield Finding(kind=kind, text=text)
    if figures.limit and figures.request < figures.limit:
        text = (
            f"{figures.name}: the scheduler counts {decimal(figures.request)} {figures.unit}, "
            f"the VM is sized by {decimal(figures.limit)}"
        )
        yield Finding(kind=Disagreement.REQUESTS_BELOW_LIMITS, text=text)


def _vm_size(figures: _Figures, available: int) -> Iterator[Finding]:
    """The VM's size against the node, which has `available` (0: unknown), and against the pod's requests."""
    dimension = figures.dimension
    if available and dimension.rounded > available:
        sum_text = f"{decimal(dimension.base)} + {decimal(dimension.requested)} = {decimal(dimension.exact)}"
        text = f"{sum_text} {figures.unit} are more than the {available} of the node"
        yield Finding(kind=Disagreement.MORE_THAN_THE_NODE, text=text)
    if dimension.granted < figures.request:
        text = (
            f"{figures.name}: the pod requests {decimal(figures.request)} {figures.unit}, "
            f"the VM has {dimension.granted}"
        )
        yield Finding(kind=Disagreement.VM_BELOW_REQUESTS, text=text)


def _memory_limits(pod: PodSizing, record: SizingRecord, memory: _Figures) -> Iterator[Finding]:
    """The VM's memory against the limit of the pod's cgroup, and against the pod's volumes in memory."""
    allowed = pod.cgroup_limit(MEMORY)
    if allowed is not None and memory.vm * MIB > allowed:
        text = f"{memory.vm_text}, the pod's cgroup allows {decimal(allowed / MIB)}: the host kills a VM that uses more"
        yield Finding(kind=Disagreement.CGROUP_BELOW_VM, text=text)
    ram_mib = record.memory_mib.granted
    if pod.memory_volumes > ram_mib * MIB:
        text = f"volumes of medium Memory may hold {decimal(pod.memory_volumes / MIB)} MiB, the VM has {ram_mib}"
        yield Finding(kind=Disagreement.VOLUMES_ABOVE_VM, text=text)


def _unlimited(figures: _Figures, containers: tuple[str, ...]) -> Iterator[Finding]:
    """`containers` have no limit, and the others' limits decide the VM's size."""
    by_requests = figures.limit < figures.request <= figures.dimension.requested
    if figures.limit and containers and not by_requests:
        text = f"{figures.name}: no limit for {', '.join(containers)}; the VM is sized by the limits of the others"
        yield Finding(kind=Disagreement.CONTAINER_WITHOUT_LIMIT, text=text)


def _huge_pages(pod: PodSizing, record: SizingRecord) -> Iterator[Finding]:
    """The VM was not sized for them: container runtimes do not report them, the webhook's annotation does."""
    lacking = pod.vm_memory() / MIB - record.memory_mib.requested
    for name, amount in sorted(pod.effective_limits().items()):
        if name.startswith(HUGEPAGES) and amount and lacking > 0:
            text = f"{name}: {decimal(amount / MIB)} MiB are reserved on the node and not added to the VM"
            yield Finding(kind=Disagreement.HUGE_PAGES_NOT_REPORTED, text=text)
