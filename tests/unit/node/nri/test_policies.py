"""Policies of one's own: how they are found, what is refused of their answers, and the two that come as examples."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.node.nri.assignments import Assignments, PlacementError, free_cpus, place, place_or_share, shared_cpus
from pyshim.node.nri.description import machine
from pyshim.node.nri.pods import Pods
from pyshim.node.nri.policies import OURS, load
from pyshim.node.nri.policy import Decision, GuardedPolicy, Policy
from tests.fakes.machines import ALL, ONE_NODE, SUB_NUMA, TWO_SOCKETS, need

EMPTY = Assignments(machine=machine(TWO_SOCKETS), reserved=(0, 16))


class Foreign:
    """A policy of another package, whose function a test gives."""

    def __init__(self, function: Callable[[Assignments, PlacementRequest], object]) -> None:
        self._function = function

    def place(self, assignments: Assignments, asked: PlacementRequest) -> Decision:
        return self._function(assignments, asked)  # type: ignore[return-value]


def own(cpus: tuple[int, ...], nodes: tuple[int, ...] = (1,), **members: object) -> Decision:
    placement = Placement(
        vcpu_cpus=cpus, service_cpus=(), cpu_nodes=nodes, memory_nodes=nodes, exclusive=bool(cpus), why="mine"
    )
    return Decision(placement=replace(placement, **members))


def guarded(policy: Policy, within_s: float = 30.0) -> tuple[GuardedPolicy, list[str]]:
    refusals: list[str] = []
    return GuardedPolicy(policy, on_refusal=lambda _need, reason: refusals.append(reason), within_s=within_s), refusals


def test_a_policys_answer_is_the_placement_and_the_rest_follows() -> None:
    guard, refusals = guarded(Foreign(lambda _, asked: own((30, 8))))

    placed = guard.place(EMPTY, need("a", 2))

    assert refusals == []
    placement = placed.placements["a"]
    assert (placement.vcpu_cpus, placement.cpu_nodes, placement.why) == ((8, 30), (1,), "mine")
    assert set(placement.service_cpus) <= set(shared_cpus(placed))
    assert {8, 30}.isdisjoint(free_cpus(placed))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(own((8, 99)), "CPUs 8,99 are of other nodes", id="foreign-cpu"),
        pytest.param(own((0, 1), (0,)), "not free any more: CPU 0", id="reserved-cpu"),
        pytest.param(own((24, 25), (1,)), "not free any more: CPU 24-25", id="cpus-of-another-vm"),
        pytest.param(own((8, 8)), "CPUs 8,8 for 2 vCPUs", id="one-cpu-twice"),
        pytest.param(own((8, 9, 10)), "for 2 vCPUs", id="too-many"),
        pytest.param(own((8, 9), (0,)), "are of other nodes", id="node-of-other-cpus"),
        pytest.param(own((8, 9), (7,)), "no CPU in node 7", id="foreign-node"),
        pytest.param(own((), ()), "no CPU in node none", id="no-node"),
        pytest.param(own((8, 9), memory_nodes=(5,)), "no memory in node 5", id="foreign-memory"),
        pytest.param(replace(own((8, 9)), moved={"b": (0,)}), "cannot move", id="moves-an-exclusive-vm"),
        pytest.param(replace(own((8, 9)), moved={"x": (0,)}), "cannot move", id="moves-an-unknown-vm"),
        pytest.param(replace(own((8, 9)), moved={"s": (9,)}), "no CPU in node 9", id="moves-to-a-foreign-node"),
        pytest.param(None, "ValidationError", id="none"),
        pytest.param({"placement": {"vcpu_cpus": "8"}}, "ValidationError", id="wrong-type"),
        pytest.param(own(("8", "9")), "ValidationError", id="texts"),  # type: ignore[arg-type]
        pytest.param(ZeroDivisionError("by me"), "ZeroDivisionError: by me", id="raises"),
        pytest.param(SystemExit(3), "SystemExit", id="exits"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_and_the_default_answers(answer: object, reason: str) -> None:
    before = place(place(EMPTY, need("s", 2, exclusive=False)), need("z", 1))
    before = GuardedPolicy(Foreign(lambda _, asked: own((24, 25))), on_refusal=pytest.fail).place(before, need("b", 2))

    def function(_: Assignments, asked: PlacementRequest) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    guard, refusals = guarded(Foreign(function))

    placed = guard.place(before, need("a", 2))

    assert placed == place_or_share(before, need("a", 2))
    (refusal,) = refusals
    assert reason in refusal


def test_a_policy_that_is_late_is_refused_and_not_asked_until_its_call_has_ended() -> None:
    asked_for, release = [], threading.Event()

    def function(assignments: Assignments, asked: PlacementRequest) -> object:
        asked_for.append(asked.sandbox_id)
        release.wait(60)
        return own((8, 9))

    guard, refusals = guarded(Foreign(function), within_s=0.05)
    try:
        first = guard.place(EMPTY, need("a", 2))
        second = guard.place(first, need("b", 2))
    finally:
        release.set()

    assert first == place_or_share(EMPTY, need("a", 2))
    assert second == place_or_share(first, need("b", 2))
    assert asked_for == ["a"]
    assert refusals == ["no answer within 0.05 s", "an earlier answer is still due"]


def test_without_room_for_exclusive_cpus_the_policy_is_asked_for_shared_ones() -> None:
    def function(_: Assignments, asked: PlacementRequest) -> Decision:
        if asked.exclusive:
            raise PlacementError("place: no room")
        return own((), (1,))

    guard, refusals = guarded(Foreign(function))

    placed = guard.place(EMPTY, need("a", 2))

    assert (refusals, placed.placements["a"].exclusive, placed.needs["a"].exclusive) == ([], False, False)
    assert placed.placements["a"].cpu_nodes == (1,)
    assert placed.placements["a"].why == "no room; mine"


def test_a_policy_can_move_the_vms_that_share_cpus() -> None:
    before = place(EMPTY, need("s", 2, exclusive=False))
    (home,) = before.placements["s"].cpu_nodes
    memory = before.placements["s"].memory_nodes
    guard, refusals = guarded(Foreign(lambda _, asked: replace(own((8, 9)), moved={"s": (1 - home,)})))

    moved = guard.place(before, need("a", 2)).placements["s"]

    assert (refusals, moved.cpu_nodes, moved.memory_nodes) == ([], (1 - home,), memory)
    node = {cpu.id: cpu.node for cpu in EMPTY.machine.cpus}
    assert {node[cpu] for cpu in moved.vcpu_cpus} == {1 - home}


def test_the_same_need_again_changes_nothing_and_another_is_placed_by_the_policy() -> None:
    sizes = []

    def function(_: Assignments, asked: PlacementRequest) -> Decision:
        sizes.append(asked.vcpus)
        return own(tuple(range(8, 8 + asked.vcpus)))

    guard, refusals = guarded(Foreign(function))
    first = guard.place(EMPTY, need("a", 2))

    assert guard.place(first, need("a", 2)) is first
    assert guard.place(first, need("a", 3)).placements["a"].vcpu_cpus == (8, 9, 10)
    assert (refusals, sizes) == ([], [2, 3])


def test_a_restarted_plugin_keeps_what_a_policy_placed_and_asks_it_for_the_next_vm() -> None:
    guard, _ = guarded(Foreign(lambda _, asked: own((8, 9) if asked.sandbox_id == "a" else (10, 11))))
    before = Pods(EMPTY, frozenset({"pykata"}), place=guard.place)
    placement = before.place_for_shim(need("a", 2))

    after = Pods(EMPTY, frozenset({"pykata"}), place=guard.place)
    after.restore(need("a", 2), placement)
    after.place_for_shim(need("b", 2))

    assert {each: had.vcpu_cpus for each, had in after.assignments.placements.items()} == {"a": (8, 9), "b": (10, 11)}


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("where", ALL)
def test_our_policies_are_never_refused(policy: str, where: str) -> None:
    guard, refusals = guarded(load(policy))
    assignments = Assignments(machine=machine(ALL[where]), reserved=())

    for number, size in enumerate((2, 1, 4, 3, 8, 2, 1, 6)):
        asked = need(f"s{number}", size, exclusive=number % 3 != 2)
        assignments = guard.place(assignments, asked)

    assert refusals == []
    assert len(assignments.placements) == 8
    taken = [cpu for each in assignments.placements.values() if each.exclusive for cpu in each.vcpu_cpus]
    assert len(taken) == len(set(taken))


def homes(policy: str, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    guard, _ = guarded(load(policy))
    assignments = Assignments(machine=machine(SUB_NUMA), reserved=())
    for number, size in enumerate(sizes):
        assignments = guard.place(assignments, need(f"s{number}", size))
    return [assignments.placements[f"s{number}"].cpu_nodes for number in range(len(sizes))]


def test_packed_fills_a_node_and_its_socket_before_another_and_spread_takes_another_socket_first() -> None:
    # Four nodes of 8 CPUs, two in each socket.
    assert homes("packed", (4, 2, 4, 2, 6)) == [(0,), (0,), (1,), (0,), (2,)]
    assert homes("spread", (4, 4, 4, 4, 4)) == [(0,), (2,), (1,), (3,), (0,)]


def test_on_a_machine_of_one_node_all_policies_have_room() -> None:
    for name in OURS:
        guard, refusals = guarded(load(name))
        placed = guard.place(Assignments(machine=machine(ONE_NODE), reserved=()), need("a", 4))
        assert (refusals, placed.placements["a"].exclusive) == ([], True)


def test_a_policy_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, metadata = tmp_path / "lastnode.py", tmp_path / "lastnode-1.dist-info"
    module.write_text(
        "from pyshim.node.nri.assignments import place_within\n"
        "from pyshim.node.nri.policy import Decision\n"
        "class LastNode:\n"
        "    def place(self, assignments, need):\n"
        "        node = assignments.machine.nodes[-1].id\n"
        "        return Decision(placement=place_within(assignments, need, (node,)))\n"
        "class Broken:\n"
        "    def __init__(self):\n"
        "        raise RuntimeError('no licence')\n"
    )
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lastnode\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[pyshim.nri.policies]\nlast = lastnode:LastNode\ngone = lastnode_gone:Gone\nbroken = lastnode:Broken\n"
        "empty = lastnode:place_within\npacked = lastnode:LastNode\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    guard, refusals = guarded(load("last"))

    assert guard.place(EMPTY, need("a", 2)).placements["a"].cpu_nodes == (1,)
    assert refusals == []
    assert load("packed") is OURS["packed"], "ours are not replaced"
    for name, problem in (
        ("gone", "ModuleNotFoundError"),
        ("broken", "RuntimeError: no licence"),
        ("empty", "no function 'place'"),
        ("other", "not installed (hint: there are broken, empty, gone, last, packed, spread, topology)"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            load(name)
        assert problem in str(caught.value)
        assert str(caught.value).startswith(f"load policy '{name}'")
