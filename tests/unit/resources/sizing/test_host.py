"""The room on a host, from made-up /proc and /sys."""

from fractions import Fraction
from pathlib import Path

import pytest

from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, CgroupLimits, CgroupMode, RamBacking
from pyshim.model.units import GIB
from pyshim.resources.sizing.host import probe_capacity

MEMINFO = """MemTotal:       24684092 kB
MemAvailable:   22955032 kB
SwapFree:        2097151 kB
HugePages_Total:     512
Hugepagesize:       2048 kB
"""


def question(parent_cgroup: str = "/", *, hugepages: bool = False) -> CapacityQuestion:
    return CapacityQuestion(parent_cgroup=parent_cgroup, hugepages=hugepages)


class Roots:
    """Empty /proc and /sys; a test writes what its host shows."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, text: object) -> None:
        file = self._path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def probe(self, asked: CapacityQuestion, mode: CgroupMode = CgroupMode.V2) -> CapacityFacts:
        return probe_capacity(
            asked, cgroup_mode=mode, proc_root=str(self._path / "proc"), sys_root=str(self._path / "sys")
        )


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path)


def test_a_host_that_shows_nothing_limits_nothing(roots: Roots) -> None:
    assert roots.probe(question("/kubepods/pod1")) == CapacityFacts(
        available_mib=None,
        swap_free_mib=0,
        backing=None,
        cgroup=CgroupLimits(memory_bytes=None, memory_path="", cpu_quota=None, cpu_path=""),
    )


def test_available_memory_and_swap_are_rounded_down_to_mib(roots: Roots) -> None:
    roots.write("proc/meminfo", MEMINFO)

    facts = roots.probe(question())

    assert (facts.available_mib, facts.swap_free_mib, facts.backing) == (22417, 2047, None)


@pytest.mark.parametrize(
    ("free", "reserved", "overcommit", "surplus", "mib"),
    [
        pytest.param(512, 0, 0, 0, 1024, id="free"),
        pytest.param(512, 500, 0, 0, 24, id="promised-to-others"),
        pytest.param(0, 0, 64, 0, 128, id="yet-to-be-made"),
        pytest.param(10, 0, 64, 60, 28, id="both"),
        pytest.param(1, 5, 0, 0, 0, id="more-promised-than-free"),
    ],
)
def test_huge_pages_a_new_vm_may_take(
    roots: Roots, free: int, reserved: int, overcommit: int, surplus: int, mib: int
) -> None:
    roots.write("proc/meminfo", MEMINFO)
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    roots.write(f"{pool}/free_hugepages", free)
    roots.write(f"{pool}/resv_hugepages", reserved)
    roots.write(f"{pool}/nr_overcommit_hugepages", overcommit)
    roots.write(f"{pool}/surplus_hugepages", surplus)

    assert roots.probe(question(hugepages=True)).backing == RamBacking(
        name="huge pages of 2 MiB", free_mib=mib, page_mib=2
    )


def test_a_kernel_without_huge_pages_has_none_free(roots: Roots) -> None:
    backing = roots.probe(question(hugepages=True)).backing

    assert backing is not None
    assert backing.free_mib == 0


def test_the_tightest_limit_on_the_way_up_counts_v2(roots: Roots) -> None:
    cgroup = "sys/fs/cgroup"
    roots.write(f"{cgroup}/kubepods/memory.max", 4 * GIB)
    roots.write(f"{cgroup}/kubepods/cpu.max", "150000 100000")
    roots.write(f"{cgroup}/kubepods/pod1/memory.max", GIB)
    roots.write(f"{cgroup}/kubepods/pod1/cpu.max", "max 100000")
    roots.write(f"{cgroup}/kubepods/pod1/c1/memory.max", 1)  # the sandbox's own

    assert roots.probe(question("/kubepods/pod1")).cgroup == CgroupLimits(
        memory_bytes=GIB, memory_path="/kubepods/pod1", cpu_quota=Fraction(3, 2), cpu_path="/kubepods"
    )


@pytest.mark.parametrize(
    ("mode", "files", "cpus", "path"),
    [
        (CgroupMode.V2, {"kubepods/pod1/cpuset.cpus.effective": "0-1"}, {0, 1}, "/kubepods/pod1"),
        (CgroupMode.V2, {"kubepods/cpuset.cpus.effective": "3"}, {3}, "/kubepods"),
        (CgroupMode.V2, {"kubepods/pod1/cpuset.cpus.effective": "", "cpuset.cpus.effective": "0-3"}, {*range(4)}, "/"),
        (CgroupMode.V2, {"kubepods/cpuset.cpus.effective": "x-y"}, None, ""),
        (CgroupMode.V1, {"cpuset/kubepods/pod1/cpuset.effective_cpus": "2"}, {2}, "/kubepods/pod1"),
        (CgroupMode.V1, {"cpuset/kubepods/cpuset.cpus": "0,2,9"}, {0, 2}, "/kubepods"),
    ],
)
def test_a_pods_cpus_are_those_of_the_innermost_cpuset_that_is_there(
    roots: Roots, mode: CgroupMode, files: dict[str, str], cpus: set[int] | None, path: str
) -> None:
    roots.write("sys/devices/system/cpu/online", "0-3")
    for name, text in files.items():
        roots.write(f"sys/fs/cgroup/{name}", text)

    found = roots.probe(question("/kubepods/pod1"), mode).cgroup

    assert (found.cpus, found.cpus_path) == (None if cpus is None else frozenset(cpus), path)


@pytest.mark.parametrize("tree", ["cpu", "cpu,cpuacct"])
def test_the_tightest_limit_on_the_way_up_counts_v1(roots: Roots, tree: str) -> None:
    cgroup = "sys/fs/cgroup"
    roots.write(f"{cgroup}/memory/memory.limit_in_bytes", 9223372036854771712)
    roots.write(f"{cgroup}/memory/kubepods/memory.limit_in_bytes", GIB)
    roots.write(f"{cgroup}/memory/kubepods/pod1/memory.limit_in_bytes", GIB)
    roots.write(f"{cgroup}/{tree}/kubepods/cpu.cfs_quota_us", -1)
    roots.write(f"{cgroup}/{tree}/kubepods/cpu.cfs_period_us", 100000)
    roots.write(f"{cgroup}/{tree}/kubepods/pod1/cpu.cfs_quota_us", 25000)
    roots.write(f"{cgroup}/{tree}/kubepods/pod1/cpu.cfs_period_us", 100000)

    assert roots.probe(question("/kubepods/pod1"), CgroupMode.V1).cgroup == CgroupLimits(
        memory_bytes=GIB, memory_path="/kubepods/pod1", cpu_quota=Fraction(1, 4), cpu_path="/kubepods/pod1"
    )


@pytest.mark.parametrize("text", ["", "max", "garbage", "-5", "1 2 3", "10 0"])
def test_a_limit_that_is_no_number_is_none(roots: Roots, text: str) -> None:
    roots.write("sys/fs/cgroup/p/memory.max", text)
    roots.write("sys/fs/cgroup/p/cpu.max", text)

    found = roots.probe(question("/p")).cgroup

    assert (found.memory_bytes, found.cpu_quota) == (None, None)


def test_this_machine_can_be_asked() -> None:
    facts = probe_capacity(question("/x"), cgroup_mode=CgroupMode.V1)

    assert facts.available_mib
