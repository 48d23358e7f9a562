"""Properties of every size: never below the exact sum, never a unit above it, monotone, blind to order."""

import math
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import CapacityQuestion, CgroupMode, HostFacts, known_cpus
from pyshim.model.oci import ContainerKind
from pyshim.model.sizing import SizingRecord, dimension
from pyshim.model.units import MIB
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.host import probe_capacity
from pyshim.resources.sizing.plan.capacity import pods_host
from pyshim.resources.sizing.plan.resize import Demand, VmSize, resize_plan
from pyshim.resources.sizing.plan.static import static_size
from pyshim.resources.sizing.plan.workload import Workload, workload
from tests.fakes.facts import host_facts

HUGE = host_facts(cpu_count=1 << 20, memory_mib=1 << 40)


def configuration(policy: str, hugepages: bool = False) -> Config:
    document: dict[str, Any] = {
        "hypervisor": {"qemu": {"enable_hugepages": hugepages}},
        "runtime": {"sizing_policy": policy},
    }
    return build_config(Source(path="t", directory="/", document=document))


CONFIGS = {(policy, huge): configuration(policy, huge) for policy in ("sum", "overhead") for huge in (False, True)}
vcpu_numbers = st.fractions(0, 64, max_denominator=100_000)
policies = st.sampled_from(["sum", "overhead"])


@st.composite
def sizings(draw: st.DrawFn) -> tuple[Config, Workload]:
    base = CONFIGS[draw(policies), draw(st.booleans())]
    hypervisor = replace(
        base.hypervisor,
        default_vcpus=draw(vcpu_numbers),
        overhead_vcpus=draw(vcpu_numbers),
        default_memory_mib=draw(st.integers(64, 1 << 16)),
        overhead_memory_mib=draw(st.integers(0, 1 << 12)),
    )
    asked = Workload(
        vcpus=draw(vcpu_numbers),
        vcpus_source="t",
        memory_bytes=draw(st.integers(0, 1 << 45)),
        memory_source="t",
        hugepage_bytes=draw(st.sampled_from([0, 2 * MIB, 1 << 30])),
    )
    return replace(base, hypervisor=hypervisor), asked


def size(config: Config, asked: Workload, host: HostFacts = HUGE) -> SizingRecord:
    return static_size(config, host, asked)


@given(sizings())
def test_the_result_is_never_below_the_sum_nor_a_unit_above_it(sizing: tuple[Config, Workload]) -> None:
    config, asked = sizing
    by_overhead = config.runtime.sizing_policy == "overhead" and asked.memory_bytes > 0
    least_mib = min(128 if by_overhead else 256, config.hypervisor.default_memory_mib)

    sized = size(config, asked)

    for each, least in ((sized.vcpus, 1), (sized.memory_mib, least_mib)):
        assert each.exact == each.base + each.requested
        assert each.exact <= each.rounded < each.exact + each.unit
        assert each.granted % each.unit == 0
        # Only the smallest VM raises a result, to exactly itself in whole units.
        assert each.granted == each.rounded or (each.rounded < least <= each.granted < least + each.unit)
        assert bool(each.limited_by) == (each.granted != each.rounded)


@given(sizings(), st.integers(1, 200), st.integers(64, 1 << 17), st.integers(0, 50), st.integers(0, 1 << 15))
def test_a_larger_host_never_gives_a_smaller_vm_and_no_limit_is_exceeded(
    sizing: tuple[Config, Workload], cpus: int, mib: int, more_cpus: int, more_mib: int
) -> None:
    config, asked = sizing
    small = replace(HUGE, cpu_count=cpus, memory_mib=mib)
    large = replace(HUGE, cpu_count=cpus + more_cpus, memory_mib=mib + more_mib)

    before, after = size(config, asked, small), size(config, asked, large)

    assert before.vcpus.granted <= min(after.vcpus.granted, cpus)
    assert before.memory_mib.granted <= min(after.memory_mib.granted, mib)


@given(sizings())
def test_a_record_survives_the_state_file(sizing: tuple[Config, Workload]) -> None:
    sized = size(*sizing).with_warnings("one", "two")

    assert SizingRecord.from_json(sized.as_json(), "record") == sized


@given(
    base=st.fractions(-100, 1000, max_denominator=1 << 20),
    asked=st.fractions(0, 1 << 20, max_denominator=1 << 20),
    unit=st.sampled_from([1, 2, 128, 1024]),
    least=st.integers(0, 1 << 12),
    most=st.integers(0, 1 << 21),
)
def test_limits_hold_in_whole_units(base: Fraction, asked: Fraction, unit: int, least: int, most: int) -> None:
    found = dimension(
        base=base,
        base_source="b",
        requested=asked,
        requested_source="r",
        unit=unit,
        least=(least, "least"),
        most=(most, "most"),
    )

    assert found.granted % unit == 0
    assert found.granted <= most
    assert found.granted >= least or found.limited_by == "most" or most - most % unit == found.granted
    assert found.limited_by in ("", "least", "most")


# ---- resizing

VM = VmSize(
    boot_vcpus=1,
    vcpus=1,
    max_vcpus=1 << 20,
    boot_memory_mib=2048,
    memory_mib=2048,
    max_memory_mib=1 << 40,
    block_mib=128,
    free_slots=1 << 20,
    virtio_mem=False,
)
demands = st.lists(
    st.builds(
        Demand,
        name=st.sampled_from(["a", "b"]),
        vcpus=st.fractions(0, 16, max_denominator=100_000),
        cpus=st.frozensets(st.integers(0, 15)),
        memory_bytes=st.integers(0, 1 << 36),
        hugepage_bytes=st.sampled_from([0, 2 * MIB]),
    ),
    max_size=6,
)


@given(demands, st.booleans(), st.sampled_from([1, 4, 128, 1024]))
def test_a_resized_vm_holds_its_containers_and_less_than_a_block_more(
    asked: list[Demand], virtio_mem: bool, block_mib: int
) -> None:
    vm = replace(VM, virtio_mem=virtio_mem, block_mib=block_mib)

    plan = resize_plan(vm, asked, CONFIGS["sum", False], HUGE)

    memory = plan.record.memory_mib
    assert memory.exact == 2048 + Fraction(sum(each.memory_bytes + each.hugepage_bytes for each in asked), MIB)
    assert memory.exact <= memory.granted < memory.exact + block_mib
    assert plan.record.vcpus.exact <= plan.vcpus < plan.record.vcpus.exact + 1
    assert not plan.record.warnings


@given(demands, st.randoms(use_true_random=False))
def test_the_order_of_containers_does_not_matter(asked: list[Demand], random: Any) -> None:
    shuffled = list(asked)
    random.shuffle(shuffled)

    assert resize_plan(VM, asked, CONFIGS["sum", False], HUGE) == resize_plan(VM, shuffled, CONFIGS["sum", False], HUGE)


@given(demands, demands)
def test_one_more_container_never_shrinks_the_vm(asked: list[Demand], more: list[Demand]) -> None:
    """Of CPUs by quota: a CPU set counts only while no container has a quota (Kata's rule)."""
    by_quota = [replace(each, cpus=frozenset()) for each in asked]
    with_more = [*by_quota, *(replace(each, cpus=frozenset()) for each in more)]

    before = resize_plan(VM, by_quota, CONFIGS["sum", False], HUGE)
    after = resize_plan(VM, with_more, CONFIGS["sum", False], HUGE)

    assert after.vcpus >= before.vcpus
    assert after.record.memory_mib.granted >= before.record.memory_mib.granted


@given(demands, st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_memory_steps_lead_from_where_the_vm_is_to_what_it_is_granted(
    asked: list[Demand], blocks: int, slots: int, virtio_mem: bool
) -> None:
    vm = replace(VM, memory_mib=2048 + blocks * 128, free_slots=slots, virtio_mem=virtio_mem)

    plan = resize_plan(vm, asked, CONFIGS["sum", False], HUGE)

    sizes = (vm.memory_mib, *plan.memory_steps_mib)
    changes = [after - before for before, after in pairwise(sizes)]
    assert sizes[-1] == plan.record.memory_mib.granted >= vm.boot_memory_mib
    assert all(change % 128 == 0 and change for change in changes)
    if not virtio_mem:
        assert len(changes) <= slots
        assert all(0 < change <= 48 * size for change, size in zip(changes, sizes, strict=False))


@given(sizings(), vcpu_numbers, st.integers(0, 1 << 20))
def test_requested_figures_stand_in_for_smaller_limits_and_shrink_nothing(
    sizing: tuple[Config, Workload], vcpus: Fraction, mib: int
) -> None:
    config, asked = sizing
    asked = replace(asked, hugepage_bytes=0)
    stating = replace(config.hypervisor, requested_vcpus=vcpus, requested_memory_mib=mib)

    alone = size(config, asked)
    as_limits = size(config, replace(asked, vcpus=vcpus, memory_bytes=mib * MIB))
    both = size(replace(config, hypervisor=stating), asked)

    assert both.vcpus.exact == (max(alone.vcpus.exact, as_limits.vcpus.exact) if vcpus else alone.vcpus.exact)
    memory = max(alone.memory_mib.exact, as_limits.memory_mib.exact) if mib else alone.memory_mib.exact
    assert both.memory_mib.exact == memory


# ---- the oracle: whatever a kubelet writes, on whatever host the container runtime was confined

QUOTAS_US = (-1, 0, 1_000, 25_000, 100_000, 150_001, 400_000, 10_000_000)
PERIODS_US = (0, 1_000, 50_000, 100_000, 1_000_000)
SHARES = (0, 2, 3, 256, 1_023, 1_024, 1_025, 4_096, 262_144)
HOSTS = tuple(product(("0-7", "0-2,5"), ("", "0-7", "1,3"), ("0", "0-7"), ("", "2", "0-3")))
"""The CPUs that are online, those of the cpuset at the top, of containerd's affinity, and of the pod's cgroup."""


def some_host(root: Path, online: str, cpuset: str, affinity: str, pod: str) -> HostFacts:
    """The facts that the shim of a pod finds on such a host."""
    files = {
        "sys/devices/system/cpu/online": online,
        "sys/fs/cgroup/cpuset.cpus.effective": cpuset,
        "sys/fs/cgroup/kubepods/pod1/cpuset.cpus.effective": pod,
        "proc/self/status": f"Cpus_allowed_list:\t{affinity}",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    roots = {"proc_root": f"{root}/proc", "sys_root": f"{root}/sys"}
    question = CapacityQuestion(parent_cgroup="/kubepods/pod1", hugepages=False)
    found = probe_host(dev_root=f"{root}/dev", run_root=f"{root}/run", **roots)
    facts = probe_capacity(question, cgroup_mode=CgroupMode.V2, **roots)
    return pods_host(replace(found, memory_mib=1 << 40), facts)


def test_a_pods_vcpus_are_those_of_the_figures_that_decide(tmp_path: Path) -> None:
    """A quota decides, also one that is off. Quota and period 0: the kubelet has switched quotas off."""
    prefix, cases = "io.kubernetes.cri.sandbox-cpu-", 0
    for number, (online, cpuset, affinity, pod) in enumerate(HOSTS):
        found = some_host(tmp_path / str(number), online, cpuset, affinity, pod)
        sets = [known_cpus(text) for text in (online, cpuset or online, pod or online)]
        cpus = max(1, len(frozenset.intersection(*sets)))
        assert found.cpu_count == cpus, (online, cpuset, affinity, pod)
        for quota, period, shares in product(QUOTAS_US, PERIODS_US, SHARES):
            cases += 1
            annotations = {f"{prefix}quota": str(quota), f"{prefix}period": str(period), f"{prefix}shares": str(shares)}
            if quota > 0 and not period:
                with pytest.raises(InvalidArgument, match="without a period"):
                    workload(ContainerKind.POD_SANDBOX, annotations, {})
                continue
            milli_cpus = -(-shares * 1000 // 1024) if shares > 2 else 0
            is_off = quota < 0 or (quota == 0 and period == 0)
            asked = Fraction(milli_cpus, 1000) if is_off else Fraction(quota, period)

            wanted = workload(ContainerKind.POD_SANDBOX, annotations, {})
            record = size(CONFIGS["sum", False], wanted, found)

            case = (online, cpuset, affinity, pod, quota, period, shares)
            assert wanted.vcpus == asked, case
            assert record.vcpus.granted == min(cpus, math.ceil(1 + asked)), case
            assert bool(record.warnings) == (quota == period == 0 and milli_cpus > 0), case
    assert cases >= 10_000
