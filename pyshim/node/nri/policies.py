"""The policies that come with pyshim, and `load`, which finds one by its name among them and the entry points.

`topology` is the default (`assignments.py`). `packed` and `spread` choose the nodes; the default's rules for cores and
caches choose the CPUs in them. Both are examples for other policies.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from importlib.metadata import EntryPoint, entry_points
from itertools import combinations

from pyshim.model.errors import InvalidArgument
from pyshim.model.sizing import PlacementRequest
from pyshim.node.nri.assignments import Assignments, PlacementError, place, place_within
from pyshim.node.nri.policy import Decision, Policy

Nodes = tuple[int, ...]


class Topology:
    """The default: the fewest and nearest nodes, and the group of CPUs that is filled best."""

    def place(self, assignments: Assignments, need: PlacementRequest) -> Decision:
        return Decision(placement=place(assignments, need).placements[need.sandbox_id])


class Packed:
    """The fewest NUMA nodes and sockets are busy, so that the others can sleep or stay whole for a large VM."""

    def place(self, assignments: Assignments, need: PlacementRequest) -> Decision:
        busy, sockets = _busy(assignments), _sockets(assignments)
        busy_sockets = {sockets[node] for node in busy}
        free = _vcpus_by_node(assignments)

        def cost(nodes: Nodes) -> tuple[object, ...]:
            new_sockets = {sockets[node] for node in nodes} - busy_sockets
            most_used = -sum(free[node] for node in nodes)
            return len(new_sockets), len(set(nodes) - busy), len(nodes), most_used, nodes

        return _first(assignments, need, cost)


class Spread:
    """The socket, and in it the node, with the fewest vCPUs for each CPU: VMs have caches and memory to themselves."""

    def place(self, assignments: Assignments, need: PlacementRequest) -> Decision:
        used, sockets = _vcpus_by_node(assignments), _sockets(assignments)
        cpus = {node: sum(cpu.node == node and cpu.online for cpu in assignments.machine.cpus) for node in sockets}

        def load(nodes: Iterable[int]) -> Fraction:
            there = tuple(nodes)
            return sum((used[node] for node in there), Fraction(0)) / sum(cpus[node] for node in there)

        def cost(nodes: Nodes) -> tuple[object, ...]:
            of_sockets = {sockets[node] for node in nodes}
            beside = [node for node in sockets if sockets[node] in of_sockets]
            return len(nodes), load(beside), load(nodes), nodes

        return _first(assignments, need, cost)


OURS: Mapping[str, Policy] = {"topology": Topology(), "packed": Packed(), "spread": Spread()}
DEFAULT = "topology"
GROUP = "pyshim.nri.policies"
"""The group of entry points. Each has the name of a policy; its value is the object, or a class without arguments."""


def load(name: str) -> Policy:
    """The policy of this name. Raises InvalidArgument when none is installed, or when it cannot be loaded."""
    if name in OURS:
        return OURS[name]
    found = {each.name: each for each in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({*OURS, *found}))
        raise InvalidArgument(f"load policy {name[:100]!r}: not installed (hint: there are {known})")
    return _loaded(found[name])


def _loaded(entry: EntryPoint) -> Policy:
    try:
        found = entry.load()
        policy: Policy = found() if isinstance(found, type) else found
    except Exception as error:  # of another program's code
        raise InvalidArgument(f"load policy '{entry.name}' ({entry.value}): {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "place", None)):
        raise InvalidArgument(f"load policy '{entry.name}' ({entry.value}): it has no function 'place'")
    return policy


def _first(assignments: Assignments, need: PlacementRequest, cost: Callable[[Nodes], tuple[object, ...]]) -> Decision:
    """A placement on the nodes that cost the least among those with room. Raises PlacementError if none have room."""
    sockets = _sockets(assignments)
    pairs = (pair for pair in combinations(sockets, 2) if sockets[pair[0]] == sockets[pair[1]])
    for nodes in sorted({*((node,) for node in sockets), *pairs}, key=cost):
        try:
            return Decision(placement=place_within(assignments, need, nodes))
        except PlacementError:
            continue
    return Decision(placement=place(assignments, need).placements[need.sandbox_id])


def _sockets(assignments: Assignments) -> dict[int, int]:
    """The socket of each node that has online CPUs."""
    return {cpu.node: cpu.socket for cpu in sorted(assignments.machine.cpus, key=lambda cpu: cpu.id) if cpu.online}


def _busy(assignments: Assignments) -> set[int]:
    return {node for placement in assignments.placements.values() for node in placement.cpu_nodes}


def _vcpus_by_node(assignments: Assignments) -> dict[int, Fraction]:
    """vCPUs of the VMs by node; those of a VM on several nodes are divided among them."""
    found = dict.fromkeys(_sockets(assignments), Fraction(0))
    for sandbox_id, placement in assignments.placements.items():
        for node in placement.cpu_nodes:
            found[node] += Fraction(assignments.needs[sandbox_id].vcpus, len(placement.cpu_nodes))
    return found
