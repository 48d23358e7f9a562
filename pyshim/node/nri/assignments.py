"""The CPUs and NUMA nodes of a VM, chosen from the machine's topology and the placements so far; pure, deterministic.

A VM is placed once, as a whole, before it boots. In this order:

1. Nodes: the fewest whose free CPUs and free memory suffice, and of those the nearest to each other. Memory is that of
   the same nodes; a node without memory brings the nearest that has some. If no nodes have enough memory, it comes from
   all of them.
2. Exclusive CPUs, as many as vCPUs: within one socket, one die, one L3 where that is possible, in whole cores. Among
   these, the group of CPUs that has the fewest left over is taken, so that large groups stay whole for large VMs. CPUs
   that other VMs share are taken last. Isolated CPUs are taken first, and never shared.
3. Shared VMs get all shared CPUs of their nodes, those with the least vCPUs for each CPU.

Exclusive CPUs and all nodes stay until the VM ends: memory does not move. Which CPUs are shared changes with every VM
that comes or goes, and shared VMs and the VMM's other threads follow. If their nodes have no shared CPU left, they use
the nearest ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import combinations

import msgspec
from msgspec.structs import replace

from pyshim.model.cpusets import cpuset_text
from pyshim.model.errors import InvalidArgument, ResourceExhausted
from pyshim.model.machine import Machine
from pyshim.model.placement import Need, Placement
from pyshim.model.units import MIB

__all__ = [
    "Assignments",
    "Need",
    "Other",
    "Placement",
    "PlacementError",
    "apply",
    "check_need",
    "free_cpus",
    "keep",
    "place",
    "place_or_share",
    "place_within",
    "release",
    "shared_cpus",
    "with_others",
]

_LEVELS = ("node", "socket", "die", "l3")
"""The groups of CPUs, from far to near."""
_ALL_SETS_OF = 2
"""Up to this many nodes every set is tried; beyond it, only each node with its nearest neighbours."""


class PlacementError(ResourceExhausted):
    """The machine has no room of the kind that is asked for."""


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A container outside our VMs."""

    container_id: str
    name: str
    """`NAMESPACE/POD/CONTAINER`, for people."""
    memory_bytes: int
    """Its request, 0 if unknown. All nodes bear it in proportion to their size."""
    own_cpus: tuple[int, ...]
    """Its exclusive CPUs, from another manager (the kubelet's). If empty, it runs on the shared CPUs."""


class Assignments(msgspec.Struct, frozen=True, kw_only=True):
    """Everything placed on a machine. `place`, `release`, `keep` and `with_others` return a changed copy."""

    machine: Machine
    reserved: tuple[int, ...]
    """CPUs that never become exclusive, like the kubelet's `reservedSystemCPUs`; shared unless they are isolated."""
    needs: Mapping[str, Need] = {}
    """By sandbox id."""
    placements: Mapping[str, Placement] = {}
    """By sandbox id."""
    others: Mapping[str, Other] = {}
    """By container id."""


def place(assignments: Assignments, need: Need) -> Assignments:
    """`need` has a placement, and shared VMs have followed. The same need again changes nothing; another need of the
    same sandbox replaces it.

    Raises PlacementError when there are not enough CPUs, InvalidArgument for an empty need.
    """
    check_need(need)
    if assignments.needs.get(need.sandbox_id) == need:
        return assignments
    before = release(assignments, need.sandbox_id)
    view = _View(before)
    if not view.shared:
        raise PlacementError(f"{_placing(need)}: no CPU is left to share")
    placement = _exclusive(view, need) if need.exclusive else _shared(view, need)
    return _with(before, need, placement)


def check_need(need: Need) -> None:
    """Raises InvalidArgument for an empty need."""
    if need.vcpus < 1 or need.memory_bytes < 0:
        raise InvalidArgument(f"{_placing(need)}: {need.vcpus} vCPUs and {need.memory_bytes} bytes are no VM")


def place_within(assignments: Assignments, need: Need, nodes: tuple[int, ...]) -> Placement:
    """The placement that `place` makes on CPUs of these nodes. Raises PlacementError."""
    view = _View(release(assignments, need.sandbox_id), nodes)
    if not view.of_nodes(view.shared, nodes):
        raise PlacementError(f"{_placing(need)}: no CPU of {_nodes(nodes)} is left to share")
    return _exclusive(view, need) if need.exclusive else _shared(view, need)


def apply(
    assignments: Assignments, need: Need, placement: Placement, moved: Mapping[str, tuple[int, ...]]
) -> Assignments:
    """`need` has `placement`, which a policy chose, and the VMs in `moved` have new CPU nodes.

    Raises PlacementError for CPUs, nodes and VMs that do not exist or are taken.
    """
    view = _View(assignments)
    if placement.exclusive and len(set(placement.vcpu_cpus)) != need.vcpus:
        raise PlacementError(f"{_placing(need)}: CPUs {cpuset_text(placement.vcpu_cpus)} for {need.vcpus} vCPUs")
    _check_nodes(view, need, placement.cpu_nodes)
    if without := {node for node in placement.memory_nodes if node not in view.with_memory}:
        raise PlacementError(f"{_placing(need)}: no memory in node {cpuset_text(without)}")
    ordered = replace(
        placement,
        vcpu_cpus=tuple(sorted(placement.vcpu_cpus)),
        cpu_nodes=tuple(sorted(set(placement.cpu_nodes))),
        memory_nodes=tuple(sorted(set(placement.memory_nodes))),
    )
    if placement.exclusive and set(placement.vcpu_cpus) - set(view.of_nodes(view.cpus, placement.cpu_nodes)):
        raise PlacementError(f"{_placing(need)}: CPUs {cpuset_text(placement.vcpu_cpus)} are of other nodes")
    placements = dict(assignments.placements)
    for sandbox_id, nodes in moved.items():
        former = placements.get(sandbox_id)
        if former is None or former.exclusive:
            raise PlacementError(f"{_placing(need)}: VM {sandbox_id[:100]!r} does not share CPUs, so it cannot move")
        _check_nodes(view, need, nodes)
        placements[sandbox_id] = replace(former, cpu_nodes=tuple(sorted(set(nodes))))
    return keep(replace(assignments, placements=placements), replace(need, exclusive=placement.exclusive), ordered)


def _check_nodes(view: "_View", need: Need, nodes: tuple[int, ...]) -> None:
    if not nodes or (without := {node for node in nodes if node not in view.with_cpus}):
        raise PlacementError(f"{_placing(need)}: no CPU in node {cpuset_text(without) if nodes else 'none'}")


def free_cpus(assignments: Assignments) -> tuple[int, ...]:
    """The CPUs that may become exclusive, in ascending order. One of the shared CPUs has to stay shared."""
    return tuple(sorted(_View(assignments).free))


def place_or_share(
    assignments: Assignments, need: Need, place: Callable[[Assignments, Need], Assignments] = place
) -> Assignments:
    """As `place`, but a VM that finds no exclusive CPUs gets shared ones; its need and `why` say so."""
    try:
        return place(assignments, need)
    except PlacementError as error:
        if not need.exclusive:
            raise
        shared = place(assignments, replace(need, exclusive=False))
        placement = shared.placements[need.sandbox_id]
        why = f"{str(error).partition(': ')[2]}; {placement.why}"
        return replace(shared, placements={**shared.placements, need.sandbox_id: replace(placement, why=why)})


def release(assignments: Assignments, sandbox_id: str) -> Assignments:
    """The sandbox's placement has ended, and shared VMs use its CPUs. Nothing changes if it had none."""
    if sandbox_id not in assignments.needs:
        return assignments
    return _settled(
        replace(
            assignments,
            needs={known: need for known, need in assignments.needs.items() if known != sandbox_id},
            placements={known: had for known, had in assignments.placements.items() if known != sandbox_id},
        )
    )


def keep(assignments: Assignments, need: Need, placement: Placement) -> Assignments:
    """`need` has its `placement` from an earlier run of the plugin: the nodes, and the CPUs if they are exclusive.

    Raises PlacementError when a CPU of it is offline, reserved or taken, or a node is not there.
    """
    before = release(assignments, need.sandbox_id)
    view = _View(before)
    if unknown := {*placement.cpu_nodes, *placement.memory_nodes} - view.nodes.keys():
        raise PlacementError(f"{_placing(need, 'keep')}: there is no node {cpuset_text(unknown)}")
    if placement.exclusive:
        if lost := set(placement.vcpu_cpus) - view.free:
            raise PlacementError(f"{_placing(need, 'keep')}: not free any more: CPU {cpuset_text(lost)}")
        if not view.shared - set(placement.vcpu_cpus):
            raise PlacementError(f"{_placing(need, 'keep')}: no CPU would be left to share")
    return _with(before, need, placement)


def with_others(assignments: Assignments, others: Iterable[Other]) -> Assignments:
    """`others` are the containers outside our VMs; shared VMs have followed."""
    return _settled(replace(assignments, others={other.container_id: other for other in others}))


def shared_cpus(assignments: Assignments) -> tuple[int, ...]:
    """The online CPUs that are neither exclusive nor isolated, in ascending order. All others run on them."""
    return tuple(sorted(_View(assignments).shared))


def _with(assignments: Assignments, need: Need, placement: Placement) -> Assignments:
    return _settled(
        replace(
            assignments,
            needs={**assignments.needs, need.sandbox_id: need},
            placements={**assignments.placements, need.sandbox_id: placement},
        )
    )


def _settled(assignments: Assignments) -> Assignments:
    """All placements use the shared CPUs as they are now."""
    view = _View(assignments)
    pools = {nodes: view.pool(nodes) for nodes in {each.cpu_nodes for each in assignments.placements.values()}}
    settled = {}
    for sandbox_id, placement in assignments.placements.items():
        pool = pools[placement.cpu_nodes]
        cpus = placement.vcpu_cpus if placement.exclusive else pool
        settled[sandbox_id] = replace(placement, vcpu_cpus=cpus, service_cpus=pool)
    return replace(assignments, placements=settled)


class _View:
    """A machine and what is taken of it, for one decision; with `limit`, only CPUs of these nodes are free."""

    def __init__(self, assignments: Assignments, limit: tuple[int, ...] | None = None) -> None:
        self._assignments = assignments
        machine = assignments.machine
        self.cpus = {cpu.id: cpu for cpu in machine.cpus if cpu.online}
        self.nodes = {node.id: node for node in machine.nodes}
        alone = [placement.vcpu_cpus for placement in assignments.placements.values() if placement.exclusive]
        alone += [other.own_cpus for other in assignments.others.values()]
        own = {cpu for cpus in alone for cpu in cpus}
        unowned = self.cpus.keys() - own
        self.shared = {cpu for cpu in unowned if not self.cpus[cpu].isolated}
        self.free = unowned - set(assignments.reserved)
        """CPUs that may become exclusive."""
        with_cpus = {cpu.node for cpu in self.cpus.values()}
        if limit is not None:
            with_cpus &= {*limit}
            self.free = set(self.of_nodes(self.free, limit))
        self.with_cpus = tuple(node for node in self.nodes if node in with_cpus)
        """Nodes that a VM may be on."""
        self.with_memory = tuple(node for node in self.with_cpus if self.nodes[node].memory_bytes > 0)
        self._at = {node.id: at for at, node in enumerate(machine.nodes)}

    @cached_property
    def cores(self) -> Mapping[int, frozenset[int]]:
        """Online CPUs by core."""
        found: dict[int, set[int]] = {}
        for cpu in self.cpus.values():
            found.setdefault(cpu.core, set()).add(cpu.id)
        return {core: frozenset(cpus) for core, cpus in found.items()}

    @cached_property
    def free_of(self) -> Mapping[str, Mapping[int, int]]:
        """How many CPUs may become exclusive, by level and group."""
        return {level: Counter(getattr(self.cpus[cpu], level) for cpu in self.free) for level in _LEVELS}

    @cached_property
    def load(self) -> Mapping[int, Fraction]:
        """vCPUs of shared VMs by node, those of a VM on several nodes spread over them."""
        found = dict.fromkeys(self.nodes, Fraction(0))
        for sandbox_id, placement in self._assignments.placements.items():
            if not placement.exclusive:
                for node in placement.cpu_nodes:
                    found[node] += Fraction(self._assignments.needs[sandbox_id].vcpus, len(placement.cpu_nodes))
        return found

    @cached_property
    def free_bytes(self) -> Mapping[int, Fraction]:
        """Free memory by node. Memory on several nodes is divided among them by their size."""
        found = {node.id: Fraction(node.memory_bytes) for node in self.nodes.values()}
        uses = [
            (self._assignments.needs[sandbox_id].memory_bytes, placement.memory_nodes or self.with_memory)
            for sandbox_id, placement in self._assignments.placements.items()
        ]
        uses += [(other.memory_bytes, self.with_memory) for other in self._assignments.others.values()]
        for used_bytes, nodes in uses:
            whole = sum(self.nodes[node].memory_bytes for node in nodes)
            for node in nodes:
                if whole:
                    found[node] -= Fraction(used_bytes * self.nodes[node].memory_bytes, whole)
        return found

    def of_nodes(self, cpus: Iterable[int], nodes: Iterable[int]) -> tuple[int, ...]:
        wanted = frozenset(nodes)
        return tuple(sorted(cpu for cpu in cpus if self.cpus[cpu].node in wanted))

    def pool(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """The shared CPUs of `nodes`; if they have none, of the nearest node that has some."""
        if found := self.of_nodes(self.shared, nodes):
            return found
        near = sorted(self.with_cpus, key=lambda other: (min(self.distance(node, other) for node in nodes), other))
        return next((found for node in near if (found := self.of_nodes(self.shared, (node,)))), ())

    def distance(self, one: int, other: int) -> int:
        return self.nodes[one].distances[self._at[other]]

    def spread(self, nodes: Iterable[int]) -> tuple[int, int]:
        """How far apart nodes are: the greatest distance, and all together."""
        found = [self.distance(one, other) for one, other in combinations(sorted(nodes), 2)]
        return max(found, default=0), sum(found)

    def memory_of(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Nodes whose memory VMs on `nodes` use."""
        found = set()
        for node in nodes:
            if node in self.with_memory:
                found.add(node)
            elif self.with_memory:
                found.add(min(self.with_memory, key=lambda other: (self.distance(node, other), other)))
        return tuple(sorted(found))

    def bound(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """`nodes`; empty if no other node has memory, since there is nothing to bind."""
        return () if all(node.id in nodes for node in self.nodes.values() if node.memory_bytes > 0) else nodes

    def sets(self, size: int) -> Iterable[tuple[int, ...]]:
        """Sets of `size` nodes worth trying, each in ascending order."""
        if size <= _ALL_SETS_OF:
            return combinations(self.with_cpus, size)
        return sorted({tuple(sorted(near[:size])) for near in self._neighbours})

    @cached_property
    def _neighbours(self) -> list[list[int]]:
        """Each node, and all others from near to far."""
        return [
            sorted(self.with_cpus, key=lambda other: (self.distance(node, other), other != node, other))
            for node in self.with_cpus
        ]


class _NodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for a VM: the nodes of its CPUs and of its memory."""

    cpu_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    memory_fits: bool


def _homes(view: _View, need: Need, cpus: Iterable[int], wanted: int) -> list[_NodeChoice]:
    """The candidates with the fewest and nearest nodes that have `wanted` of `cpus`, and the memory if any have it.

    There is at least one, since all nodes together suffice.
    """
    counts = Counter(view.cpus[cpu].node for cpu in cpus)
    memory_fits = not view.with_memory or sum(view.free_bytes[node] for node in view.with_memory) >= need.memory_bytes
    best: list[_NodeChoice] = []
    best_size: tuple[int, tuple[int, int]] | None = None
    for count in range(1, len(view.with_cpus) + 1):
        if best_size is not None and best_size[0] < count:
            break
        for nodes in view.sets(count):
            if sum(counts[node] for node in nodes) < wanted:
                continue
            memory_nodes = view.memory_of(nodes) if memory_fits else view.with_memory
            if memory_fits and memory_nodes and sum(view.free_bytes[each] for each in memory_nodes) < need.memory_bytes:
                continue
            # If memory comes from all nodes, candidates differ by the nodes of their CPUs.
            together = {*nodes, *memory_nodes} if memory_fits else set(nodes)
            size = len(together), view.spread(together)
            if best_size is None or size < best_size:
                best, best_size = [], size
            if size == best_size:
                best.append(_NodeChoice(cpu_nodes=nodes, memory_nodes=memory_nodes, memory_fits=memory_fits))
    return best


# ---- shared VMs


def _shared(view: _View, need: Need) -> Placement:
    """A placement on the nodes whose shared CPUs have the fewest vCPUs each."""
    wanted = min(need.vcpus, len(view.of_nodes(view.shared, view.with_cpus)))

    def crowd(home: _NodeChoice) -> tuple[object, ...]:
        cpus = len(view.of_nodes(view.shared, home.cpu_nodes))
        free_bytes = sum(view.free_bytes[node] for node in home.memory_nodes)
        return (_load(view, home, need) / cpus, -free_bytes, home.cpu_nodes)

    home = min(_homes(view, need, view.shared, wanted), key=crowd)
    cpus = len(view.of_nodes(view.shared, home.cpu_nodes))
    load = _load(view, home, need)
    vcpus = _count(int(load), "vCPU") if load.denominator == 1 else f"{float(load):.1f} vCPUs"
    sharing = f"{vcpus} on {_count(cpus, 'CPU')} with it"
    return Placement(
        vcpu_cpus=(),
        service_cpus=(),
        cpu_nodes=home.cpu_nodes,
        memory_nodes=view.bound(home.memory_nodes),
        exclusive=False,
        why=f"shared CPUs of {_nodes(home.cpu_nodes)}: {sharing}{_costs(view, home, need)}",
    )


def _load(view: _View, home: _NodeChoice, need: Need) -> Fraction:
    return sum((view.load[node] for node in home.cpu_nodes), Fraction(need.vcpus))


# ---- exclusive VMs


def _exclusive(view: _View, need: Need) -> Placement:
    """A placement with one exclusive CPU for each vCPU."""
    must_keep_one = view.shared <= view.free  # no shared CPU is reserved
    if must_keep_one and not view.free <= view.shared:
        # Isolated CPUs are free as well, so the choice could take every shared CPU: set one aside.
        view.free.discard(min(view.shared))
        must_keep_one = False
    spare = len(view.free) - must_keep_one
    if spare < need.vcpus:
        reserved = len(view.shared - view.free)
        raise PlacementError(
            f"{_placing(need)}: {need.vcpus} exclusive CPUs: {max(0, spare)} are left of {len(view.cpus)}: "
            f"{len(view.cpus) - len(view.free | view.shared)} have an owner, {reserved or 'one'} must stay shared"
        )
    home, cpus = _best(view, need)
    split = _shared_cores(view, cpus)
    whole = len({view.cpus[cpu].core for cpu in cpus}) - len(split)
    threads = sum(view.cpus[cpu].core in split for cpu in cpus)
    parts = [_count(number, noun) for number, noun in ((whole, "whole core"), (threads, "thread")) if number]
    within = next(
        (f"one {'L3' if level == 'l3' else level}" for level in reversed(_LEVELS) if _groups(view, cpus, level) == 1),
        _count(_groups(view, cpus, "socket"), "socket"),
    )
    sharing = f", sharing {_count(len(split), 'core')} with others" if split else ""
    where = f"{within} of {_nodes(home.cpu_nodes)}"
    return Placement(
        vcpu_cpus=cpus,
        service_cpus=(),
        cpu_nodes=home.cpu_nodes,
        memory_nodes=view.bound(home.memory_nodes),
        exclusive=True,
        why=f"CPUs of its own: {' and '.join(parts)} in {where}{sharing}{_costs(view, home, need)}",
    )


def _best(view: _View, need: Need) -> tuple[_NodeChoice, tuple[int, ...]]:
    """The nodes and the exclusive CPUs that cost the least."""
    homes = _homes(view, need, view.free, need.vcpus)
    found = [(home, _cpus_of(view, view.of_nodes(view.free, home.cpu_nodes), need.vcpus)) for home in homes]

    def cost(option: tuple[_NodeChoice, tuple[int, ...]]) -> tuple[object, ...]:
        home, cpus = option
        return (*_crowding(view, cpus, home), *_quality(view, cpus))

    return min(found, key=cost)


def _cpus_of(view: _View, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of `cpus`, close to each other: chosen from wholly free cores or from all, whichever is better."""
    there = frozenset(cpus)
    whole = [cpu for cpu in cpus if view.cores[view.cpus[cpu].core] <= there]
    options = [_close(view, pool, count, _LEVELS) for pool in (tuple(whole), cpus) if len(pool) >= count]
    return min(options, key=lambda option: _quality(view, option))


def _close(view: _View, cpus: tuple[int, ...], count: int, levels: tuple[str, ...]) -> tuple[int, ...]:
    """`count` of `cpus` from the best group of the first level that has so many; else the largest group and others."""
    if not levels:
        return _from_cores(view, cpus, count)
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(getattr(view.cpus[cpu], levels[0]), []).append(cpu)
    if fitting := [tuple(group) for group in groups.values() if len(group) >= count]:
        options = [_close(view, group, count, levels[1:]) for group in fitting]
        return min(options, key=lambda option: _quality(view, option))
    largest = max(groups.values(), key=lambda group: (len(group), -group[0]))
    taken = frozenset(largest)
    rest = tuple(cpu for cpu in cpus if cpu not in taken)
    return tuple(sorted((*largest, *_close(view, rest, count - len(largest), levels))))


def _from_cores(view: _View, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of `cpus`: whole cores first, the rest from cores that are partly taken already, if there are any."""
    by_core: dict[int, list[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: not view.cpus[cpu].isolated):
        by_core.setdefault(view.cpus[cpu].core, []).append(cpu)
    whole = [core for core in by_core if len(by_core[core]) == len(view.cores[core])]
    parts = [core for core in by_core if core not in whole]
    chosen: list[int] = []
    for core in whole:
        if len(by_core[core]) <= count - len(chosen):
            chosen += by_core[core]
    for core in (*parts, *whole):
        chosen += [cpu for cpu in by_core[core] if cpu not in chosen][: count - len(chosen)]
    return tuple(sorted(chosen))


def _quality(view: _View, cpus: tuple[int, ...]) -> tuple[object, ...]:
    """The cost of an exclusive set, its gravest part first; the least is the best."""
    mixed = _shared_cores(view, cpus)
    left = []
    for level in reversed(_LEVELS):
        touched = {getattr(view.cpus[cpu], level) for cpu in cpus}
        left.append(sum(view.free_of[level][group] for group in touched) - len(cpus))
    return (
        _groups(view, cpus, "socket"),
        _groups(view, cpus, "die"),
        len(mixed),
        _groups(view, cpus, "l3"),
        sum(not view.cpus[cpu].isolated for cpu in cpus),
        sum(view.cores[core] <= view.free for core in mixed),
        *left,
        cpus,
    )


def _shared_cores(view: _View, cpus: Iterable[int]) -> frozenset[int]:
    """Cores that the VM would share with others."""
    taken = frozenset(cpus)
    return frozenset(core for cpu in taken if not view.cores[core := view.cpus[cpu].core] <= taken)


def _groups(view: _View, cpus: Iterable[int], level: str) -> int:
    return len({getattr(view.cpus[cpu], level) for cpu in cpus})


def _crowding(view: _View, cpus: tuple[int, ...], home: _NodeChoice) -> tuple[object, ...]:
    """The harm to shared VMs: CPUs they lack for one CPU per vCPU, then whether the nodes lose all shared CPUs."""
    remaining = [view.of_nodes(view.shared - set(cpus), (node,)) for node in home.cpu_nodes]
    missing = sum(
        max(Fraction(0), view.load[node] - len(left)) for node, left in zip(home.cpu_nodes, remaining, strict=True)
    )
    return missing, not any(remaining)


# ---- texts


def _placing(need: Need, verb: str = "place") -> str:
    return f"{verb} sandbox '{need.sandbox_id}' ({need.name})"


def _nodes(nodes: Iterable[int]) -> str:
    found = tuple(nodes)
    return f"node{'s' if len(found) > 1 else ''} {cpuset_text(found)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _costs(view: _View, home: _NodeChoice, need: Need) -> str:
    """The drawbacks of the nodes, as text."""
    if not home.memory_nodes:
        return "; the memory of the nodes is unknown"
    if not home.memory_fits:
        return f"; {need.memory_bytes // MIB} MiB are free on no nodes: memory from any"
    if home.memory_nodes != home.cpu_nodes:
        return f"; memory of {_nodes(home.memory_nodes)}"
    return "; no fewer nodes have the CPUs and the memory" if len(home.cpu_nodes) > 1 else ""
