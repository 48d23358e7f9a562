"""A VM that does not fit is refused with its numbers; one over the pod's cgroup is noted, or refused by a key."""

from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HOST_SIDE_MIB, CapacityFacts, CgroupLimits, HostFacts, RamBacking
from pyshim.model.units import MIB
from pyshim.resources.sizing.plan.capacity import capacity_check, pods_host
from pyshim.resources.sizing.plan.static import static_size
from pyshim.resources.sizing.plan.workload import Workload
from tests.fakes.inputs import config, configured, host

UNLIMITED = CgroupLimits(memory_bytes=None, memory_path="", cpu_quota=None, cpu_path="")
PLENTY = CapacityFacts(available_mib=16000, swap_free_mib=0, backing=None, cgroup=UNLIMITED)


def pod_cgroup(mib: int | None = None, cpus: str | None = None) -> CgroupLimits:
    return CgroupLimits(
        memory_bytes=None if mib is None else mib * MIB,
        memory_path="/kubepods/pod1",
        cpu_quota=None if cpus is None else Fraction(cpus),
        cpu_path="/kubepods/pod1",
    )


def check(config: Config, host: HostFacts, facts: CapacityFacts, vcpus: str = "0", mib: int = 0) -> tuple[str, ...]:
    asked = Workload(vcpus=Fraction(vcpus), vcpus_source="t", memory_bytes=mib * MIB, memory_source="t")
    return capacity_check(static_size(config, host, asked), config, host, facts)


@pytest.mark.parametrize(
    ("keys", "changes", "mib"),
    [
        pytest.param({}, {}, 0, id="plenty"),
        pytest.param({}, {"available_mib": 2048}, 0, id="exactly"),
        pytest.param({}, {"available_mib": 1000, "swap_free_mib": 1048}, 0, id="with-swap"),
        pytest.param({}, {"available_mib": None}, 9000, id="nothing-known"),
        pytest.param(
            {"enable_hugepages": True},
            {"available_mib": 10, "backing": RamBacking(name="huge pages of 2 MiB", free_mib=2048, page_mib=2)},
            0,
            id="huge-pages-are-not-available-memory",
        ),
        pytest.param({}, {"backing": RamBacking(name="'/dev/shm'", free_mib=2048, page_mib=1)}, 0, id="shm"),
    ],
)
def test_what_fits_is_silent(keys: dict[str, Any], changes: dict[str, Any], mib: int) -> None:
    assert check(config(**keys), host(), replace(PLENTY, **changes), mib=mib) == ()


@pytest.mark.parametrize(
    ("keys", "changes", "mib", "said"),
    [
        pytest.param(
            {},
            {"available_mib": 2047},
            0,
            "size vm: its 2048 MiB of RAM (default_memory 2048 MiB) do not fit on this host: less than 2048 MiB "
            "are available",
            id="a-mib-short",
        ),
        pytest.param(
            {},
            {"available_mib": 1000, "swap_free_mib": 1000},
            0,
            "less than 2048 MiB are available, free swap included",
            id="swap",
        ),
        pytest.param(
            {"enable_mem_prealloc": True},
            {"available_mib": 1000, "swap_free_mib": 9000},
            0,
            "less than 1024 MiB are available",
            id="preallocated-ram-is-not-swapped",
        ),
        pytest.param(
            {"enable_hugepages": True},
            {"backing": RamBacking(name="huge pages of 2 MiB", free_mib=1024, page_mib=2)},
            0,
            "do not fit in huge pages of 2 MiB: 1024 MiB are free",
            id="huge-pages",
        ),
        pytest.param(
            {"enable_hugepages": True, "default_memory": 1536},
            {"backing": RamBacking(name="huge pages of 1024 MiB", free_mib=4096, page_mib=1024)},
            0,
            "are no multiple of the page of huge pages of 1024 MiB, 1024 MiB",
            id="page-size",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(
    keys: dict[str, Any], changes: dict[str, Any], mib: int, said: str
) -> None:
    with pytest.raises(FailedPrecondition) as error:
        check(config(**keys), host(), replace(PLENTY, **changes), mib=mib)

    assert said in str(error.value)


def test_a_pods_annotation_above_the_hosts_cpus_is_refused_and_the_files_base_and_a_workload_are_not() -> None:
    by_file = config(default_vcpus=Fraction("8.5"))
    by_pod = replace(by_file, annotated={"default_vcpus": "io.x.default_vcpus"})

    assert check(config(default_vcpus=8), host(cpu_count=8), PLENTY, vcpus="4") == ()
    assert check(by_file, host(cpu_count=8), PLENTY) == ()
    said = r"default_vcpus = 8.5 in annotation 'io.x.default_vcpus': this host has 8 CPUs"
    with pytest.raises(FailedPrecondition, match=said):
        check(by_pod, host(cpu_count=8), PLENTY)


def test_a_pods_cgroup_with_fewer_cpus_than_asked_limits_the_size_and_is_named() -> None:
    narrow = replace(PLENTY, cgroup=replace(UNLIMITED, cpus=frozenset({0, 3}), cpus_path="/kubepods/pod1"))
    wide = replace(PLENTY, cgroup=replace(UNLIMITED, cpus=frozenset(range(8)), cpus_path="/"))
    asked = Workload(vcpus=Fraction(4), vcpus_source="t", memory_bytes=0, memory_source="t")
    by_pod = replace(config(default_vcpus=3), annotated={"default_vcpus": "io.x.default_vcpus"})

    sized = static_size(config(), pods_host(host(cpu_count=8), narrow), asked)

    assert sized.vcpus.explain("vCPU").endswith("-> 5 vCPU, limited to 2 by the CPUs of cgroup '/kubepods/pod1'")
    assert pods_host(host(cpu_count=8), wide) == pods_host(host(cpu_count=8), PLENTY) == host(cpu_count=8)
    with pytest.raises(FailedPrecondition, match=r"io.x.default_vcpus': cgroup '/kubepods/pod1' has 2 CPUs"):
        check(by_pod, pods_host(host(cpu_count=8), narrow), PLENTY)


def test_a_vm_larger_than_the_pods_cgroup_is_a_warning() -> None:
    fits = replace(PLENTY, cgroup=pod_cgroup(2048 + HOST_SIDE_MIB))
    short = replace(PLENTY, cgroup=pod_cgroup(2048 + HOST_SIDE_MIB - 1))

    assert check(config(), host(), fits) == ()
    (warning,) = check(config(), host(), short)
    assert f"{2048 + HOST_SIDE_MIB} MiB (2048 of guest RAM, {HOST_SIDE_MIB} of the VMM" in warning
    assert f"exceed the {2047 + HOST_SIDE_MIB} MiB that cgroup '/kubepods/pod1' allows" in warning


def test_strict_memory_makes_it_an_error() -> None:
    short = replace(PLENTY, cgroup=pod_cgroup(2048))
    strict = configured(runtime={"strict_memory": True})

    with pytest.raises(FailedPrecondition, match=r"exceed the 2048 MiB.*strict_memory in '/etc/test.toml'"):
        check(strict, host(), short)
    assert check(strict, host(), PLENTY) == ()


@pytest.mark.parametrize(("cgroup_only", "refused"), [(False, False), (True, True)])
def test_preallocated_ram_over_the_limit_of_the_cgroup_it_is_charged_to_cannot_fit(
    cgroup_only: bool, refused: bool
) -> None:
    config = configured(qemu={"enable_mem_prealloc": True}, runtime={"sandbox_cgroup_only": cgroup_only})
    short = replace(PLENTY, cgroup=pod_cgroup(1024))

    if refused:
        with pytest.raises(FailedPrecondition, match="enable_mem_prealloc uses all of it at once"):
            check(config, host(), short)
    else:
        assert len(check(config, host(), short)) == 1


def test_huge_pages_are_not_charged_to_the_cgroups_memory() -> None:
    backing = RamBacking(name="huge pages of 2 MiB", free_mib=4096, page_mib=2)
    facts = replace(PLENTY, backing=backing, cgroup=pod_cgroup(HOST_SIDE_MIB))

    assert check(config(enable_hugepages=True), host(), facts) == ()
    assert len(check(config(enable_hugepages=True), host(), replace(facts, cgroup=pod_cgroup(HOST_SIDE_MIB - 1)))) == 1


@pytest.mark.parametrize(
    ("vcpus", "quota", "warned"),
    [
        pytest.param("1", "1.25", False, id="rounding-and-base"),
        pytest.param("0.5", "1.001", False, id="less-than-a-cpu"),
        pytest.param("0.5", "1", True, id="a-whole-vcpu"),
    ],
)
def test_vcpus_that_can_never_run_at_once_are_a_warning(vcpus: str, quota: str, warned: bool) -> None:
    warnings = check(config(), host(), replace(PLENTY, cgroup=pod_cgroup(cpus=quota)), vcpus=vcpus)

    assert bool(warnings) == warned
    assert all("vCPUs share the" in warning and "/kubepods/pod1" in warning for warning in warnings)


@pytest.mark.parametrize("available_mib", [1024, 1100, 1999])
def test_the_same_refusal_has_the_same_words_while_the_hosts_memory_changes(available_mib: int) -> None:
    """The kubelet merges events of one text."""
    with pytest.raises(FailedPrecondition, match="less than 2048 MiB are available"):
        check(config(default_memory=4096), host(), replace(PLENTY, available_mib=available_mib))
