"""A running VM follows its containers; one of fixed size refuses."""

from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.units import MIB
from pyshim.resources.sizing.plan.resize import (
    Demand,
    VmSize,
    check_static_update,
    demand,
    merged,
    resize_plan,
    total_memory_bytes,
    total_vcpus,
)
from tests.fakes.inputs import config, host

VM = VmSize(
    boot_vcpus=1,
    vcpus=1,
    max_vcpus=8,
    boot_memory_mib=2048,
    memory_mib=2048,
    max_memory_mib=16384,
    block_mib=128,
    free_slots=10,
    virtio_mem=False,
)


def asks(vcpus: str = "0", mib: int = 0, cpus: str = "", hugepage_mib: int = 0, name: str = "c") -> Demand:
    return Demand(
        name=name,
        vcpus=Fraction(vcpus),
        cpus=frozenset(int(cpu) for cpu in cpus.split(",") if cpu),
        memory_bytes=mib * MIB,
        hugepage_bytes=hugepage_mib * MIB,
    )


@pytest.mark.parametrize(
    ("base", "demands", "vcpus", "exact"),
    [
        pytest.param("1", [], 1, "1", id="no-containers"),
        pytest.param("1", [asks()], 1, "1", id="no-limits"),
        pytest.param("0.5", [asks("0.25")], 1, "3/4", id="0.5+250m"),
        pytest.param("1.1", [asks("1.2"), asks("0.7")], 3, "3", id="1.1+1.2+0.7"),
        pytest.param("1", [asks("1/3")] * 3, 2, "2", id="three-thirds-are-one"),
        pytest.param("1", [asks(cpus="0,1,2")], 4, "4", id="cpuset-only"),
        pytest.param("1", [asks(cpus="0,1"), asks(cpus="1,2")], 4, "4", id="union-of-cpusets"),
        pytest.param("1", [asks("0.5"), asks(cpus="0,1,2,3")], 2, "3/2", id="no-cpusets-beside-a-quota"),
        pytest.param("1", [asks("0.5", cpus="0,1,2,3")], 2, "3/2", id="quota-before-cpuset"),
        pytest.param("0.001", [], 1, "1/1000", id="never-none"),
    ],
)
def test_vcpus_are_the_default_and_all_quotas_rounded_once(
    base: str, demands: list[Demand], vcpus: int, exact: str
) -> None:
    plan = resize_plan(VM, demands, config(default_vcpus=Fraction(base)), host())

    assert (plan.vcpus, plan.record.vcpus.exact) == (vcpus, Fraction(exact))
    assert plan.record.policy == "dynamic"


@pytest.mark.parametrize(
    ("demands", "vcpus", "mib"),
    [
        pytest.param([], 1, 2048, id="no-containers"),
        pytest.param([asks("2", mib=512), asks()], 4, 3072, id="smaller-limits"),
        pytest.param([asks("4", mib=2048)], 5, 4096, id="larger-limits"),
    ],
)
def test_requested_figures_count_as_long_as_there_are_containers(demands: list[Demand], vcpus: int, mib: int) -> None:
    keys = {"requested_vcpus": Fraction(3), "requested_memory": 1024}

    plan = resize_plan(VM, demands, config(**keys), host())

    assert (plan.vcpus, plan.record.memory_mib.granted) == (vcpus, mib)


@pytest.mark.parametrize(
    ("keys", "vm", "demands", "vcpus", "mib", "warning"),
    [
        pytest.param({}, {}, [asks("9")], 8, 2048, "10 vCPUs wanted, 8 given: limited by the host's CPUs", id="host"),
        pytest.param(
            {"default_maxvcpus": 3},
            {},
            [asks("5")],
            3,
            2048,
            "6 vCPUs wanted, 3 given: limited by default_maxvcpus",
            id="key",
        ),
        pytest.param(
            {},
            {"max_vcpus": 2},
            [asks("5")],
            2,
            2048,
            "6 vCPUs wanted, 2 given: limited by what the VM was made for",
            id="vm",
        ),
        pytest.param(
            {},
            {},
            [asks(mib=14337)],
            1,
            16384,
            "16512 MiB wanted, 16384 given: limited by the host's memory",
            id="host-memory",
        ),
        pytest.param(
            {"default_maxmemory": 3000},
            {},
            [asks(mib=1024)],
            1,
            2944,
            "3072 MiB wanted, 2944 given: limited by default_maxmemory",
            id="maxmemory-in-whole-blocks",
        ),
        pytest.param(
            {},
            {"free_slots": 0},
            [asks(mib=512)],
            1,
            2048,
            "2560 MiB wanted, 2048 given: limited by memory slots",
            id="slots",
        ),
        pytest.param(
            {},
            {"memory_mib": 3072},
            [asks(mib=512)],
            1,
            3072,
            "memory stays at 3072 MiB: DIMMs are not taken away",
            id="dimms-stay",
        ),
    ],
)
def test_what_cannot_be_done_is_a_warning_with_its_numbers(
    keys: dict[str, Any], vm: dict[str, Any], demands: list[Demand], vcpus: int, mib: int, warning: str
) -> None:
    plan = resize_plan(replace(VM, **vm), demands, config(**keys), host())

    assert (plan.vcpus, plan.record.memory_mib.granted, plan.record.warnings) == (vcpus, mib, (warning,))
    assert plan.record.vcpus.limited_by or plan.record.memory_mib.limited_by


def test_virtio_mem_shrinks_down_to_the_boot_size_in_one_step() -> None:
    vm = replace(VM, memory_mib=8192, virtio_mem=True, free_slots=0)

    assert resize_plan(vm, [asks(mib=500)], config(), host()).memory_steps_mib == (2560,)
    assert resize_plan(vm, [], config(), host()).memory_steps_mib == (2048,)


def test_vcpus_go_down_with_their_containers_and_not_below_the_boot_size() -> None:
    vm = replace(VM, boot_vcpus=2, vcpus=6)

    assert resize_plan(vm, [asks("3")], config(default_vcpus=2), host()).vcpus == 5
    assert resize_plan(vm, [], config(default_vcpus=1), host()).vcpus == 2


def test_a_small_guest_grows_in_steps_it_can_describe_to_itself() -> None:
    """48 times its size at once, the next step counting from there (64 -> 3136 -> all of it)."""
    vm = replace(VM, boot_memory_mib=64, memory_mib=64)
    demands = [asks(mib=12800)]

    assert resize_plan(vm, demands, config(default_memory=64), host()).memory_steps_mib == (3136, 12864)
    one_slot = resize_plan(replace(vm, free_slots=1), demands, config(default_memory=64), host())
    assert one_slot.memory_steps_mib == (3136,)
    assert one_slot.record.warnings == ("12864 MiB wanted, 3136 given: limited by memory slots",)
    virtio = resize_plan(replace(vm, virtio_mem=True), demands, config(default_memory=64), host())
    assert virtio.memory_steps_mib == (12864,)


@pytest.mark.parametrize(
    ("update", "result"),
    [
        pytest.param({}, {"cpu": {"quota": 5, "period": 9, "shares": 7}, "memory": {"limit": 3}}, id="nothing"),
        pytest.param(
            {"cpu": {"quota": 8, "period": 0}, "memory": {"limit": 0}},
            {"cpu": {"quota": 8, "period": 9, "shares": 7}, "memory": {"limit": 3}},
            id="zero-is-as-before",
        ),
        pytest.param(
            {"cpu": {"quota": -1}},
            {"cpu": {"quota": -1, "period": 9, "shares": 7}, "memory": {"limit": 3}},
            id="quota-off",
        ),
        pytest.param(
            {"cpu": {"cpus": "0-1", "mems": "0"}, "memory": {"limit": 4, "swap": 9}},
            {
                "cpu": {"quota": 5, "period": 9, "shares": 7, "cpus": "0-1", "mems": "0"},
                "memory": {"limit": 4, "swap": 9},
            },
            id="cpuset-and-memory",
        ),
        pytest.param(
            {"cpu": None, "hugepageLimits": [{"limit": 1}]},
            {"cpu": {"quota": 5, "period": 9, "shares": 7}, "memory": {"limit": 3}, "hugepageLimits": [{"limit": 1}]},
            id="huge-pages",
        ),
    ],
)
def test_an_update_changes_what_it_names(update: dict[str, Any], result: dict[str, Any]) -> None:
    before = {"cpu": {"quota": 5, "period": 9, "shares": 7}, "memory": {"limit": 3}}

    assert merged(before, update) == result
    assert before == {"cpu": {"quota": 5, "period": 9, "shares": 7}, "memory": {"limit": 3}}


def test_a_demand_is_read_from_oci_resources() -> None:
    resources = {"cpu": {"quota": 50000, "period": 100000, "cpus": "0-1"}, "memory": {"limit": 5}}

    assert demand("c", resources) == Demand(
        name="c", vcpus=Fraction(1, 2), cpus=frozenset({0, 1}), memory_bytes=5, hugepage_bytes=0
    )
    assert demand("c", {"cpu": {"quota": -1, "shares": 2048}}).vcpus == 2
    assert total_vcpus([demand("c", {"cpu": {"cpus": "0-3"}})]) == (4, "CPU sets of the containers")
    assert total_vcpus([]) == (0, "no CPU limit")
    assert total_memory_bytes([asks(mib=1), asks(mib=2, hugepage_mib=3)]) == 6 * MIB
    with pytest.raises(InvalidArgument, match=r"cpu\.quota"):
        demand("c", {"cpu": {"quota": "x"}})


STATIC = replace(VM, vcpus=3, memory_mib=3072)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([asks("1", 512)], [asks("3", 3072)], id="up-to-what-it-has"),
        pytest.param([asks("5", 9000)], [asks("4", 8000)], id="downwards-from-too-much"),
        pytest.param([asks("5", 512)], [asks("5", 1024)], id="one-dimension-over-already"),
        pytest.param([asks("1", 1)], [asks()], id="limits-off"),
        pytest.param([asks(cpus="0")], [asks(cpus="0,1,2,3")], id="a-larger-cpu-set"),
    ],
)
def test_a_static_vm_takes_updates_up_to_its_size(before: list[Demand], after: list[Demand]) -> None:
    check_static_update("update container 'web'", STATIC, before, after)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(
            [asks("1", name="web")],
            [asks("3.001", name="web")],
            "update container 'web': 3.001 CPUs for all containers are more than the 3 vCPUs",
            id="cpus",
        ),
        pytest.param(
            [asks("1", 3072, name="m")],
            [asks("1", 3073, name="m")],
            "update container 'web': 3073 MiB for all containers are more than the 3072 MiB",
            id="memory",
        ),
        pytest.param([asks(cpus="0,1,2,3", name="w")], [asks("4", name="w")], "4 CPUs", id="whatever-the-cpu-set-was"),
    ],
)
def test_a_static_vm_refuses_updates_beyond_it(before: list[Demand], after: list[Demand], said: str) -> None:
    with pytest.raises(FailedPrecondition) as error:
        check_static_update("update container 'web'", STATIC, before, after)

    assert said in str(error.value)
    assert "static_sandbox_resource_mgmt" in str(error.value)
