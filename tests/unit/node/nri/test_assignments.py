"""Where VMs are put: the order of what counts, on described machines, and what holds whatever comes and goes."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Cpu, Machine, MachineError, Node
from pyshim.model.host_facts import checked_machine as checked
from pyshim.model.units import MIB
from pyshim.node.nri.assignments import (
    Assignments,
    Other,
    Placement,
    PlacementError,
    PlacementRequest,
    keep,
    place,
    place_or_share,
    release,
    shared_cpus,
    with_others,
)
from pyshim.node.nri.description import Description, machine
from tests.fakes.machines import (
    ALL,
    CHIPLETS,
    NO_MEMORY_IN_1,
    ONE_NODE,
    SMT_OFF,
    SUB_NUMA,
    TWO_SOCKETS,
    need,
    with_device_memory,
)


def placed(of: Description | Machine, *needs: PlacementRequest, reserved: tuple[int, ...] = ()) -> Assignments:
    """`needs` one after the other."""
    there = machine(of) if isinstance(of, Description) else of
    assignments = Assignments(machine=there, reserved=reserved)
    for each in needs:
        assignments = place(assignments, each)
    return assignments


def cpus(assignments: Assignments, sandbox_id: str) -> tuple[int, ...]:
    return assignments.placements[sandbox_id].vcpu_cpus


# ---- exclusive CPUs


@pytest.mark.parametrize(
    ("of", "sizes", "expected"),
    [
        pytest.param(TWO_SOCKETS, [2], [(0, 16)], id="two threads are a whole core"),
        pytest.param(TWO_SOCKETS, [8], [(0, 1, 2, 3, 16, 17, 18, 19)], id="a whole die"),
        pytest.param(
            TWO_SOCKETS, [6, 4, 2], [(0, 1, 2, 16, 17, 18), (4, 5, 20, 21), (3, 19)], id="the best filled die"
        ),
        pytest.param(TWO_SOCKETS, [1, 1], [(0,), (16,)], id="odd ones share a core, so that others stay whole"),
        pytest.param(TWO_SOCKETS, [1, 2], [(0,), (1, 17)], id="a whole core in a die that has one in parts"),
        pytest.param(TWO_SOCKETS, [3], [(0, 1, 16)], id="whole cores first, then a part of one"),
        pytest.param(SMT_OFF, [3], [(0, 1, 2)], id="without siblings a CPU is a core"),
        pytest.param(CHIPLETS, [8, 8], [(0, 1, 2, 3, 64, 65, 66, 67), (4, 5, 6, 7, 68, 69, 70, 71)], id="an L3 each"),
    ],
)
def test_exclusive_cpus_are_close_and_whole_cores(
    of: Description, sizes: list[int], expected: list[tuple[int, ...]]
) -> None:
    assignments = placed(of, *(need(f"s{number}", size) for number, size in enumerate(sizes)))

    assert [cpus(assignments, f"s{number}") for number in range(len(sizes))] == expected


def test_two_dies_of_a_socket_before_two_sockets() -> None:
    assignments = placed(TWO_SOCKETS, need("big", 12))

    assert assignments.placements["big"].cpu_nodes == (0,)
    assert {cpu // 4 % 4 for cpu in cpus(assignments, "big")} == {0, 1}


def test_a_whole_core_of_another_l3_before_halves_of_two_cores() -> None:
    """Who shares a core with another tenant shares its execution units and its first caches."""
    first = placed(Description(l3s=2, cores=2, threads=2, memory_mib=1024), need("a", 1), need("b", 1, memory_mib=1))
    # The first L3 has halves only: 0 with 4 went to a and b; c takes one thread of core 1.
    halves = release(place(first, need("c", 1)), "a")

    assert cpus(halves, "c") == (1,)
    assert cpus(place(halves, need("d", 2)), "d") == (2, 6)


def test_a_vm_that_fits_no_node_gets_the_fewest_and_nearest() -> None:
    assignments = placed(SUB_NUMA, need("wide", 12))

    placement = assignments.placements["wide"]
    assert (placement.cpu_nodes, placement.memory_nodes) == ((0, 1), (0, 1))
    assert placement.why == (
        "CPUs of its own: 6 whole cores in one die of nodes 0-1; no fewer nodes have the CPUs and the memory"
    )


def test_memory_that_fits_no_node_takes_more_nodes() -> None:
    placement = placed(SUB_NUMA, need("fat", 2, memory_mib=40_000)).placements["fat"]

    assert (placement.cpu_nodes, placement.memory_nodes) == ((0, 1), (0, 1))
    assert len(placement.vcpu_cpus) == 2


def test_memory_that_is_counted_on_is_not_free() -> None:
    assignments = placed(TWO_SOCKETS, need("fat", 2, memory_mib=60_000), need("next", 2, memory_mib=10_000))

    assert assignments.placements["next"].memory_nodes == (1,)


def test_memory_that_is_nowhere_may_come_from_any_node() -> None:
    """The VM boots or fails by the memory that is free at that time."""
    placement = placed(TWO_SOCKETS, need("fat", 2, memory_mib=200_000)).placements["fat"]

    assert (placement.cpu_nodes, placement.memory_nodes) == ((0,), ())
    assert placement.why.endswith("; 200000 MiB are free on no nodes: memory from any")


def test_memory_of_other_containers_counts_on_all_nodes() -> None:
    other = Other(container_id="c", name="default/db/c", memory_bytes=65536 * MIB, own_cpus=())
    before = with_others(placed(TWO_SOCKETS), [other])

    assert place(before, need("fat", 2, memory_mib=40_000)).placements["fat"].cpu_nodes == (0, 1)


def test_a_machine_of_one_node_binds_no_memory() -> None:
    """There is nothing to keep it from, and not every kernel and QEMU can."""
    assert placed(ONE_NODE, need("a", 2)).placements["a"].memory_nodes == ()


def test_a_node_without_memory_is_the_last_and_brings_the_nearest_memory() -> None:
    assignments = placed(NO_MEMORY_IN_1, *(need(f"s{number}", 8) for number in range(3)), need("last", 6))

    assert [assignments.placements[f"s{number}"].cpu_nodes for number in range(3)] == [(0,), (2,), (3,)]
    last = assignments.placements["last"]
    assert (last.cpu_nodes, last.memory_nodes) == ((1,), (0,))
    assert last.why.endswith("; memory of node 0")


def test_memory_of_a_node_without_cpus_is_not_used() -> None:
    there = with_device_memory(ONE_NODE, 1 << 20)

    placement = placed(there, need("fat", 2, memory_mib=100_000)).placements["fat"]

    assert placement.memory_nodes == (0,)


def test_reserved_cpus_are_shared_and_never_exclusive() -> None:
    assignments = placed(ONE_NODE, need("a", 4), reserved=(0, 4))

    assert set(cpus(assignments, "a")) & {0, 4} == set()
    assert set(shared_cpus(assignments)) >= {0, 4}


ISOLATED = Description(cores=4, threads=2, memory_mib=16384, isolated="2-3,6-7")


def test_isolated_cpus_are_for_exclusive_vms_first_and_never_shared() -> None:
    assignments = placed(ISOLATED, need("s", 2, exclusive=False), need("x", 2))

    assert cpus(assignments, "x") == (2, 6)
    assert shared_cpus(assignments) == cpus(assignments, "s") == (0, 1, 4, 5)


def test_a_vm_with_all_isolated_cpus_and_more_leaves_one_that_can_be_shared() -> None:
    assignments = placed(ISOLATED, need("x", 7))

    assert shared_cpus(assignments) == (0,)
    with pytest.raises(
        PlacementError, match="1 exclusive CPUs: 0 are left of 8: 7 have an owner, one must stay shared"
    ):
        place(assignments, need("y", 1))


def test_a_machine_on_which_no_cpu_can_be_shared_takes_no_vm() -> None:
    with pytest.raises(PlacementError, match="no CPU is left to share"):
        placed(Description(cores=2, memory_mib=64, isolated="0-1"), need("x", 1))


def test_isolated_cpus_that_are_reserved_are_left_alone() -> None:
    assignments = placed(ISOLATED, need("x", 4), reserved=(2, 6))

    assert cpus(assignments, "x") == (1, 3, 5, 7)
    assert shared_cpus(assignments) == (0, 4)


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    assignments = placed(ONE_NODE, need("a", 4), reserved=(0,))

    with pytest.raises(PlacementError) as refused:
        place(assignments, need("b", 4))

    assert str(refused.value) == (
        "place sandbox 'b' (default/b): 4 exclusive CPUs: 3 are left of 8: 4 have an owner, 1 must stay shared"
    )


def test_the_last_cpu_stays_shared() -> None:
    with pytest.raises(
        PlacementError, match="8 exclusive CPUs: 7 are left of 8: 0 have an owner, one must stay shared"
    ):
        placed(ONE_NODE, need("a", 8))


def test_a_vm_without_room_for_exclusive_cpus_can_share() -> None:
    assignments = place_or_share(placed(ONE_NODE, need("a", 4)), need("b", 5))

    placement = assignments.placements["b"]
    assert (placement.exclusive, placement.vcpu_cpus) == (False, shared_cpus(assignments))
    assert placement.why.startswith("5 exclusive CPUs: 3 are left of 8")


# ---- shared CPUs


def test_shared_vms_go_where_there_are_the_fewest_vcpus_for_each_cpu() -> None:
    assignments = placed(TWO_SOCKETS, *(need(f"s{number}", 4, exclusive=False) for number in range(4)))

    homes = [assignments.placements[f"s{number}"].cpu_nodes for number in range(4)]
    assert homes == [(0,), (1,), (0,), (1,)]
    assert cpus(assignments, "s0") == (*range(8), *range(16, 24))


def test_exclusive_vms_spare_nodes_whose_shared_vms_need_their_cpus() -> None:
    busy = placed(TWO_SOCKETS, need("s", 14, exclusive=False))

    assert place(busy, need("x", 4)).placements["x"].cpu_nodes == (1,)


def test_shared_vms_follow_and_exclusive_ones_stay() -> None:
    first = placed(TWO_SOCKETS, need("s", 2, exclusive=False), need("x", 4), need("y", 4))

    after = release(first, "x")

    assert cpus(after, "y") == cpus(first, "y")
    assert set(cpus(after, "s")) == set(cpus(first, "s")) | set(cpus(first, "x"))
    assert set(after.placements["y"].service_cpus) == set(cpus(after, "s"))


def test_a_node_without_shared_cpus_uses_those_of_the_nearest() -> None:
    assignments = placed(SUB_NUMA, need("s", 1, exclusive=False), *(need(f"x{n}", 8) for n in range(3)), need("y", 7))

    (left,) = shared_cpus(assignments)
    assert [assignments.placements[f"x{n}"].cpu_nodes for n in range(3)] == [(1,), (2,), (3,)]
    assert all(placement.service_cpus == (left,) for placement in assignments.placements.values())


def test_cpus_that_another_owns_are_neither_shared_nor_exclusive() -> None:
    other = Other(container_id="c", name="default/db/c", memory_bytes=0, own_cpus=(0, 1, 2))
    assignments = with_others(placed(ONE_NODE, need("s", 2, exclusive=False)), [other])

    assert cpus(assignments, "s") == (3, 4, 5, 6, 7)
    assert set(cpus(place(assignments, need("x", 2)), "x")) == {3, 7}


# ---- the life of a placement


def test_the_same_need_again_changes_nothing_and_another_replaces_it() -> None:
    first = placed(TWO_SOCKETS, need("a", 4))

    assert place(first, need("a", 4)) is first
    assert place(first, need("a", 6)) == placed(TWO_SOCKETS, need("a", 6))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"vcpu_cpus": (0, 99)}, r"keep sandbox 'b' \(default/b\): not free any more: CPU 0,99"),
        ({"cpu_nodes": (7,)}, "there is no node 7"),
        ({"vcpu_cpus": (*range(2, 16), *range(17, 32))}, "not free any more: CPU 17"),
    ],
)
def test_a_placement_on_taken_or_missing_cpus_is_refused(changed: dict[str, Any], problem: str) -> None:
    before = with_others(placed(TWO_SOCKETS), [Other(container_id="c", name="c", memory_bytes=0, own_cpus=(0, 17))])
    had = {"vcpu_cpus": (1,), "service_cpus": (2,), "cpu_nodes": (0,), "memory_nodes": (0,), "why": "", **changed}

    with pytest.raises(PlacementError, match=problem):
        keep(before, need("b", 2), Placement(exclusive=True, **had))


@pytest.mark.parametrize("wrong", [{"vcpus": 0}, {"memory_mib": -1}], ids=str)
def test_an_empty_need_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="place sandbox 'a'"):
        placed(ONE_NODE, need("a", wrong.pop("vcpus", 1), **wrong))


# ---- machines


def _cpu(number: int, node: int = 0) -> Cpu:
    return Cpu(id=number, core=number, l3=0, die=0, socket=0, node=node, online=True)


NODE = Node(id=0, memory_bytes=MIB, distances=(10,))


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (Machine(cpus=(_cpu(1), _cpu(1)), nodes=(NODE,)), "read CPU 1: it is there twice"),
        (Machine(cpus=(_cpu(1, node=3),), nodes=(NODE,)), "read CPU 1: node 3 does not exist"),
        (Machine(cpus=(), nodes=(NODE,)), "read machine: no CPU is online"),
        (Machine(cpus=(_cpu(1),), nodes=(NODE, NODE)), "read node 0: 1 distances to 2 nodes"),
    ],
)
def test_a_machine_that_contradicts_itself_is_refused(there: Machine, problem: str) -> None:
    with pytest.raises(MachineError, match=problem):
        checked(there)


def test_a_machine_is_put_into_order() -> None:
    nodes = (Node(id=4, memory_bytes=1, distances=(10, 30)), Node(id=2, memory_bytes=2, distances=(20, 10)))

    ordered = checked(Machine(cpus=(_cpu(1, 2), _cpu(0, 4)), nodes=nodes))

    assert [cpu.id for cpu in ordered.cpus] == [0, 1]
    assert [(node.id, node.distances) for node in ordered.nodes] == [(2, (10, 20)), (4, (30, 10))]


# ---- whatever comes and goes


_small = st.integers(min_value=1, max_value=2)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sockets, dies, l3s, threads, nodes = (draw(_small) for _ in range(5))
    cores = draw(st.sampled_from([2, 4]))
    count = sockets * dies * l3s * cores * threads
    offline, isolated = (
        ",".join(map(str, sorted(draw(st.sets(st.integers(min_value=1, max_value=count - 1), max_size=count // 3)))))
        for _ in range(2)
    )
    sizes = draw(st.lists(st.sampled_from([0, 1024, 4096]), min_size=sockets * nodes, max_size=sockets * nodes))
    return machine(
        Description(
            sockets=sockets,
            dies=dies,
            l3s=l3s,
            cores=cores,
            threads=threads,
            nodes=nodes,
            memory_mib=tuple(sizes),
            offline=offline,
            isolated=isolated,
        )
    )


_needs = st.builds(
    need,
    st.sampled_from("abcdef"),
    st.integers(min_value=1, max_value=9),
    memory_mib=st.sampled_from([0, 512, 3000]),
    exclusive=st.booleans(),
)
_steps = st.lists(st.one_of(_needs, st.sampled_from("abcdef")), max_size=12)


def walked(there: Machine, steps: Sequence[PlacementRequest | str], reserved: Iterable[int] = ()) -> list[Assignments]:
    """The assignments after each step: a need is placed, a sandbox released. What is refused changes nothing."""
    found = [Assignments(machine=there, reserved=tuple(reserved))]
    for step in steps:
        before = found[-1]
        try:
            found.append(release(before, step) if isinstance(step, str) else place(before, step))
        except PlacementError:
            assert isinstance(step, PlacementRequest)
            assert step.exclusive
    return found


@given(there=machines(), steps=_steps, reserved=st.sets(st.integers(min_value=0, max_value=3)))
def test_no_cpu_has_two_owners_and_no_owned_one_is_shared(
    there: Machine, steps: list[PlacementRequest | str], reserved: set[int]
) -> None:
    online = {cpu.id for cpu in there.cpus if cpu.online}
    isolated = {cpu.id for cpu in there.cpus if cpu.isolated}
    for assignments in walked(there, steps, reserved):
        shared = set(shared_cpus(assignments))
        owned: list[int] = []
        for sandbox_id, placement in assignments.placements.items():
            asked = assignments.needs[sandbox_id]
            assert placement.service_cpus
            assert set(placement.service_cpus) <= shared
            assert set(placement.memory_nodes) <= {node.id for node in there.nodes if node.memory_bytes}
            if placement.exclusive:
                assert len(placement.vcpu_cpus) == asked.vcpus
                assert {cpu.node for cpu in there.cpus if cpu.id in placement.vcpu_cpus} <= set(placement.cpu_nodes)
                owned += placement.vcpu_cpus
            else:
                assert placement.vcpu_cpus == placement.service_cpus
        assert len(owned) == len(set(owned))
        assert shared == online - isolated - set(owned)
        assert not set(owned) & (shared | reserved)


@given(there=machines(), steps=_steps, last=_needs)
def test_a_placement_that_is_released_leaves_everything_as_it_was(
    there: Machine, steps: list[PlacementRequest | str], last: PlacementRequest
) -> None:
    before = release(walked(there, steps)[-1], last.sandbox_id)
    after = walked_one(before, last)

    assert release(after, last.sandbox_id) == before


def walked_one(before: Assignments, asked: PlacementRequest) -> Assignments:
    try:
        return place(before, asked)
    except PlacementError:
        return before


@given(there=machines(), steps=_steps)
def test_the_same_story_has_the_same_end(there: Machine, steps: list[PlacementRequest | str]) -> None:
    mixed = Machine(cpus=tuple(reversed(there.cpus)), nodes=there.nodes)

    assert walked(there, steps)[-1] == walked(checked(mixed), steps)[-1]


@given(there=machines(), steps=_steps)
def test_exclusive_vms_never_move(there: Machine, steps: list[PlacementRequest | str]) -> None:
    story = walked(there, steps)
    for before, after in pairwise(story):
        for sandbox_id, placement in before.placements.items():
            if before.needs[sandbox_id] == after.needs.get(sandbox_id):
                now = after.placements[sandbox_id]
                assert (now.cpu_nodes, now.memory_nodes) == (placement.cpu_nodes, placement.memory_nodes)
                if placement.exclusive:
                    assert now.vcpu_cpus == placement.vcpu_cpus


@given(there=machines(), steps=_steps)
def test_a_restart_restores_every_placement(there: Machine, steps: list[PlacementRequest | str]) -> None:
    before = walked(there, steps)[-1]
    again = Assignments(machine=there, reserved=())
    for sandbox_id, placement in sorted(before.placements.items(), reverse=True):
        again = keep(again, before.needs[sandbox_id], placement)

    assert again == before


@pytest.mark.parametrize("name", ALL)
def test_every_free_cpu_can_be_had(name: str) -> None:
    """Fragmentation never refuses a VM: of the CPUs all but one can become exclusive, one at a time."""
    there = machine(ALL[name])
    online = sum(cpu.online for cpu in there.cpus)

    assignments = placed(there, *(need(f"s{number}", 1, memory_mib=1) for number in range(online - 1)))

    assert len(shared_cpus(assignments)) == 1
