"""The request of a pod or a container: quota, shares, CPU sets, memory, huge pages.

A pod's sum comes from annotations of its sandbox (`pod_figures.py`); a container's own figures are its spec's
`linux.resources`. Sources: kubelet's sandbox resources, OCI runtime-spec config-linux.md.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import msgspec

from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import cpu_set
from pyshim.model.oci import ContainerKind
from pyshim.model.units import MIN_SHARES, SHARES_PER_CPU
from pyshim.resources.sizing.plan.pod_figures import PodFigures, in_64_bits, pod_figures

NO_CPU_LIMIT, NO_MEMORY_LIMIT = "no CPU limit", "no memory limit"
DEFAULT_PERIOD_US = 100_000
"""The kernel's period where a spec names none. Source: Documentation/scheduler/sched-bwc.rst."""
_UNLIMITED_FROM = 1 << 62
"""Memory limits from here on mean "none": the kernel's page counter maximum and what stands for it in the field."""
_NO_QUOTAS = "the kubelet sets no CPU quotas (cpuCFSQuota: false), so vCPUs are those of the pod's CPU requests"
_GROUPS = ("cpu", "memory", "pids", "blockIO", "network", "rdma", "unified")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A request; zero means "no limit stated". `*_source` names the field of each figure."""

    vcpus: Fraction
    vcpus_source: str
    memory_bytes: int
    memory_source: str
    hugepage_bytes: int = 0
    """Huge pages the guest sets aside: memory beside the limit, so it is added to it."""
    warnings: tuple[str, ...] = ()
    """For the sizing's record."""

    @property
    def total_bytes(self) -> int:
        return self.memory_bytes + self.hugepage_bytes


NO_LIMITS = Workload(vcpus=Fraction(0), vcpus_source=NO_CPU_LIMIT, memory_bytes=0, memory_source=NO_MEMORY_LIMIT)


class CpuRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU members of one set of resources, checked; 0 for one that is absent."""

    quota_us: int
    period_us: int
    shares: int
    cpus: frozenset[int]
    is_quota_off: bool
    """The CPUs are not limited by a quota, although there may be a limit: only the shares tell of them."""

    @property
    def by_quota(self) -> Fraction:
        return Fraction(self.quota_us, self.period_us) if self.quota_us > 0 else Fraction(0)

    @property
    def by_shares(self) -> Fraction:
        """CPUs behind the shares, only where the quota is off: of containers with CPUs of their own, or of all pods.

        The kubelet writes floor(milliCPU * 1024 / 1000) shares, from which the milliCPU are computed here. Kata rounds
        up to whole CPUs at this point; for whole CPUs, such as exclusive ones, both results agree.
        """
        if not self.is_quota_off or self.shares <= MIN_SHARES:
            return Fraction(0)
        return Fraction(-(-self.shares * 1000 // SHARES_PER_CPU), 1000)


def workload(kind: ContainerKind, annotations: Mapping[str, str], raw_spec: Mapping[str, Any]) -> Workload:
    """The workload's request. Raises InvalidArgument naming the annotation or member that is wrong."""
    if kind is ContainerKind.POD_SANDBOX:
        return _pod_workload(pod_figures(annotations))
    return container_workload((raw_spec.get("linux") or {}).get("resources") or {})


def container_workload(resources: Mapping[str, Any]) -> Workload:
    """One container's request, from its OCI resources. A CPU set counts only without a quota."""
    cpu = cpu_request(resources)
    memory_bytes, hugepage_bytes = memory_request(resources)
    candidates = (
        (cpu.by_quota, "linux.resources.cpu quota/period"),
        (Fraction(len(cpu.cpus)), "linux.resources.cpu.cpus"),
        (cpu.by_shares, "linux.resources.cpu.shares, quota off"),
    )
    vcpus, vcpus_source = next((found for found in candidates if found[0]), (Fraction(0), NO_CPU_LIMIT))
    memory_source = "linux.resources.memory.limit" if memory_bytes else NO_MEMORY_LIMIT
    return Workload(
        vcpus=vcpus,
        vcpus_source=vcpus_source,
        memory_bytes=memory_bytes,
        memory_source=f"{memory_source} + hugepageLimits" if hugepage_bytes else memory_source,
        hugepage_bytes=hugepage_bytes,
    )


def check_groups(resources: Mapping[str, Any]) -> None:
    """Every group of OCI resources is an object, whatever is in it. Raises InvalidArgument naming the one that is not.

    For updates, which are merged group by group.
    """
    for name in _GROUPS:
        _group(resources, name)


def cpu_request(resources: Mapping[str, Any]) -> CpuRequest:
    """The CPU part of OCI resources. A quota without a period has the kernel's. Raises InvalidArgument."""
    members = _group(resources, "cpu")
    period = _member(members, "cpu.period")
    if period < 0:
        raise InvalidArgument(f"read spec: linux.resources.cpu.period is negative: {period}")
    quota = _member(members, "cpu.quota")
    return CpuRequest(
        quota_us=quota,
        is_quota_off=quota < 0,
        period_us=period or DEFAULT_PERIOD_US,
        shares=_member(members, "cpu.shares"),
        cpus=cpu_set(members.get("cpus") or "", "linux.resources.cpu.cpus"),
    )


def memory_request(resources: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the memory limit and of all huge page limits; 0 for no limit. Raises InvalidArgument."""
    limit = _limit(_member(_group(resources, "memory"), "memory.limit"))
    pages = resources.get("hugepageLimits") or ()
    if not isinstance(pages, list | tuple):
        raise InvalidArgument("read spec: linux.resources.hugepageLimits is not a list")
    hugepages = 0
    for page in pages:
        if not isinstance(page, Mapping):
            raise InvalidArgument("read spec: linux.resources.hugepageLimits holds something that is not an object")
        hugepages += _limit(_member(page, "hugepageLimits.limit"))
    return limit, hugepages


def swap_request(resources: Mapping[str, Any]) -> tuple[int, int, int]:
    """Bytes of the memory limit, of memory and swap together (0 for none of them), and the swappiness.

    Raises InvalidArgument.
    """
    memory = _group(resources, "memory")
    limit, together = (_limit(_member(memory, f"memory.{name}")) for name in ("limit", "swap"))
    return limit, together, _member(memory, "memory.swappiness")


def requested_cpu(kind: ContainerKind, annotations: Mapping[str, str], raw_spec: Mapping[str, Any]) -> CpuRequest:
    """The CPU part of what `workload` is made of. Raises InvalidArgument naming the annotation or member."""
    if kind is ContainerKind.POD_SANDBOX:
        return _pod_cpu(pod_figures(annotations))
    return cpu_request((raw_spec.get("linux") or {}).get("resources") or {})


def _pod_cpu(figures: PodFigures) -> CpuRequest:
    quota, period = figures.quota_us, figures.period_us
    if quota > 0 and period <= 0:
        raise InvalidArgument(f"read {figures.quota_source}: {quota} without a period gives no ratio")
    # The kubelet writes a period for every pod, with a limit or without, unless cpuCFSQuota is false: then it is 0.
    is_off = quota < 0 or quota == period == 0
    return CpuRequest(quota_us=quota, period_us=period, shares=figures.shares, cpus=frozenset(), is_quota_off=is_off)


def _pod_workload(figures: PodFigures) -> Workload:
    cpu = _pod_cpu(figures)
    memory_bytes = _limit(figures.memory_bytes)
    candidates = ((cpu.by_quota, figures.quota_source), (cpu.by_shares, f"{figures.shares_source}, quota off"))
    vcpus, vcpus_source = next((found for found in candidates if found[0]), (Fraction(0), NO_CPU_LIMIT))
    return Workload(
        vcpus=vcpus,
        vcpus_source=vcpus_source,
        memory_bytes=memory_bytes,
        memory_source=figures.memory_source if memory_bytes else NO_MEMORY_LIMIT,
        warnings=(_NO_QUOTAS,) if vcpus and not (figures.quota_us or figures.period_us) else (),
    )


def _limit(value: int) -> int:
    return value if 0 < value < _UNLIMITED_FROM else 0


def _group(resources: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = resources.get(name) or {}
    if not isinstance(group, Mapping):
        raise InvalidArgument(f"read spec: linux.resources.{name} is not an object")
    return group


def _member(group: Mapping[str, Any], path: str) -> int:
    value = group.get(path.rpartition(".")[2])
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"read spec: linux.resources.{path} is not a whole number: {str(value)[:100]!r}")
    return in_64_bits(value, f"spec: linux.resources.{path}")
