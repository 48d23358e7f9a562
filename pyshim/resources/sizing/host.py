"""The room on this host for one more VM: memory or huge pages, and the pod's cgroup."""

import os
from fractions import Fraction
from operator import itemgetter

from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, CgroupLimits, CgroupMode, RamBacking, known_cpus
from pyshim.resources.cgroups.host import hierarchies as kernel


def probe_capacity(
    question: CapacityQuestion,
    *,
    cgroup_mode: CgroupMode,
    proc_root: str = "/proc",
    sys_root: str = "/sys",
) -> CapacityFacts:
    """The present facts. A file that cannot be read counts as "no limit known"."""
    meminfo = _meminfo(f"{proc_root}/meminfo")
    available_kib = meminfo.get("MemAvailable")
    page_kib = meminfo.get("Hugepagesize", 0)
    return CapacityFacts(
        available_mib=None if available_kib is None else available_kib // 1024,
        swap_free_mib=meminfo.get("SwapFree", 0) // 1024,
        backing=_hugepages(page_kib, f"{sys_root}/kernel/mm/hugepages") if question.hugepages else None,
        cgroup=_cgroup_limits(
            question.parent_cgroup,
            cgroup_mode,
            f"{sys_root}/fs/cgroup",
            known_cpus(kernel.read(f"{sys_root}/devices/system/cpu/online")),
        ),
    )


def _meminfo(path: str) -> dict[str, int]:
    """KiB (or counts) by name."""
    found = {}
    for line in kernel.read(path).splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            found[name.strip()] = int(number[0])
    return found


def _hugepages(page_kib: int, root: str) -> RamBacking:
    """Pages of the default size for a new VM: free ones without a reservation, and those the kernel may still make.

    Source: the kernel's admin-guide/mm/hugetlbpage.rst.
    """
    if not page_kib:
        return RamBacking(name="huge pages: this host has none", free_mib=0, page_mib=1)
    pool = f"{root}/hugepages-{page_kib}kB"
    free = _number(f"{pool}/free_hugepages") - _number(f"{pool}/resv_hugepages")
    more = _number(f"{pool}/nr_overcommit_hugepages") - _number(f"{pool}/surplus_hugepages")
    pages = max(0, free) + max(0, more)
    page_mib = max(1, page_kib // 1024)
    return RamBacking(name=f"huge pages of {page_mib} MiB", free_mib=pages * page_kib // 1024, page_mib=page_mib)


def _cgroup_limits(path: str, mode: CgroupMode, root: str, online: frozenset[int]) -> CgroupLimits:
    limits, quotas = [], []
    cpus: frozenset[int] | None = None
    cpus_path = ""
    for cgroup in kernel.upwards(path):
        if (limit := _memory_limit(cgroup, mode, root)) is not None:
            limits.append((limit, cgroup or "/"))
        if (quota := _cpu_quota(cgroup, mode, root)) is not None:
            quotas.append((quota, cgroup or "/"))
        if cpus is None and (found := _cpus(cgroup, mode, root) & online):
            cpus, cpus_path = found, cgroup or "/"  # a cgroup has none that those above it lack
    # Of equal limits the first one, which is the innermost.
    memory_bytes, memory_path = min(limits, key=itemgetter(0), default=(None, ""))
    cpu_quota, cpu_path = min(quotas, key=itemgetter(0), default=(None, ""))
    return CgroupLimits(
        memory_bytes=memory_bytes,
        memory_path=memory_path,
        cpu_quota=cpu_quota,
        cpu_path=cpu_path,
        cpus=cpus,
        cpus_path=cpus_path,
    )


def _cpus(cgroup: str, mode: CgroupMode, root: str) -> frozenset[int]:
    """The CPUs of the cgroup's cpuset; empty if it has none or is not there yet. On v1, also some that are offline."""
    names: tuple[str, ...] = (f"{cgroup}/cpuset.cpus.effective",)
    if mode is not CgroupMode.V2:
        names = (f"/cpuset{cgroup}/cpuset.effective_cpus", f"/cpuset{cgroup}/cpuset.cpus")
    return next(filter(None, (known_cpus(kernel.read(root + name)) for name in names)), frozenset())


def _memory_limit(cgroup: str, mode: CgroupMode, root: str) -> int | None:
    if mode is CgroupMode.V2:
        return kernel.number(f"{root}{cgroup}/memory.max")
    return kernel.number(f"{root}/memory{cgroup}/memory.limit_in_bytes")


def _cpu_quota(cgroup: str, mode: CgroupMode, root: str) -> Fraction | None:
    if mode is CgroupMode.V2:
        words = kernel.read(f"{root}{cgroup}/cpu.max").split()
    else:
        tree = next((name for name in ("cpu", "cpu,cpuacct") if os.path.isdir(f"{root}/{name}")), "cpu")
        place = f"{root}/{tree}{cgroup}/cpu.cfs_"
        words = [kernel.read(f"{place}{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return Fraction(int(words[0]), int(words[1]))


def _number(path: str) -> int:
    return kernel.number(path) or 0
