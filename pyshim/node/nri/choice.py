"""Chooses the CPUs and NUMA nodes of one VM. Pure, deterministic; `assignments.py` has the rules."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import msgspec

from pyshim.model.host_facts import cpuset_text
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.model.units import MIB
from pyshim.node.nri.capacity import LEVELS, Capacity, PlacementError


class _NodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for a VM: the nodes of its CPUs and of its memory."""

    cpu_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    memory_fits: bool


def _node_choices(capacity: Capacity, need: PlacementRequest, cpus: Iterable[int], wanted: int) -> list[_NodeChoice]:
    """The candidates with the fewest and nearest nodes that have `wanted` of `cpus`, and the memory if any have it.

    There is at least one, since all nodes together suffice.
    """
    counts = Counter(capacity.cpus[cpu].node for cpu in cpus)
    memory_fits = not capacity.memory_nodes or capacity.free_memory(capacity.memory_nodes) >= need.memory_bytes
    best: list[_NodeChoice] = []
    best_size: tuple[int, tuple[int, int]] | None = None
    for count in range(1, len(capacity.cpu_nodes) + 1):
        if best_size is not None and best_size[0] < count:
            break
        for nodes in capacity.candidate_sets(count):
            if sum(counts[node] for node in nodes) < wanted:
                continue
            memory_nodes = capacity.memory_of(nodes) if memory_fits else capacity.memory_nodes
            if memory_fits and memory_nodes and capacity.free_memory(memory_nodes) < need.memory_bytes:
                continue
            # If memory comes from all nodes, candidates differ by the nodes of their CPUs.
            together = {*nodes, *memory_nodes} if memory_fits else set(nodes)
            size = len(together), capacity.spread(together)
            if best_size is None or size < best_size:
                best, best_size = [], size
            if size == best_size:
                best.append(_NodeChoice(cpu_nodes=nodes, memory_nodes=memory_nodes, memory_fits=memory_fits))
    return best


# ---- shared VMs


def shared_placement(capacity: Capacity, need: PlacementRequest) -> Placement:
    """A placement on the nodes whose shared CPUs have the fewest vCPUs each."""
    wanted = min(need.vcpus, len(capacity.of_nodes(capacity.shared, capacity.cpu_nodes)))

    def cost(choice: _NodeChoice) -> tuple[object, ...]:
        cpus = len(capacity.of_nodes(capacity.shared, choice.cpu_nodes))
        return (_load(capacity, choice, need) / cpus, -capacity.free_memory(choice.memory_nodes), choice.cpu_nodes)

    choice = min(_node_choices(capacity, need, capacity.shared, wanted), key=cost)
    cpus = len(capacity.of_nodes(capacity.shared, choice.cpu_nodes))
    load = _load(capacity, choice, need)
    vcpus = _count(int(load), "vCPU") if load.denominator == 1 else f"{float(load):.1f} vCPUs"
    sharing = f"{vcpus} on {_count(cpus, 'CPU')} with it"
    return Placement(
        vcpu_cpus=(),
        service_cpus=(),
        cpu_nodes=choice.cpu_nodes,
        memory_nodes=capacity.binding(choice.memory_nodes),
        exclusive=False,
        why=f"shared CPUs of {nodes_text(choice.cpu_nodes)}: {sharing}{_drawbacks(capacity, choice, need)}",
    )


def _load(capacity: Capacity, choice: _NodeChoice, need: PlacementRequest) -> Fraction:
    return sum((capacity.load[node] for node in choice.cpu_nodes), Fraction(need.vcpus))


# ---- exclusive VMs


def exclusive_placement(capacity: Capacity, need: PlacementRequest) -> Placement:
    """A placement with one exclusive CPU for each vCPU."""
    must_keep_one = capacity.shared <= capacity.free  # no shared CPU is reserved
    if must_keep_one and not capacity.free <= capacity.shared:
        # Isolated CPUs are free as well, so the choice could take every shared CPU: set one aside.
        capacity.free.discard(min(capacity.shared))
        must_keep_one = False
    spare = len(capacity.free) - must_keep_one
    if spare < need.vcpus:
        owned = len(capacity.cpus) - len(capacity.free | capacity.shared)
        reserved = len(capacity.shared - capacity.free)
        raise PlacementError(
            f"{action_on(need)}: {need.vcpus} exclusive CPUs: {max(0, spare)} are left of {len(capacity.cpus)}: "
            f"{owned} have an owner, {reserved or 'one'} must stay shared"
        )
    choice, cpus = _best_cpus(capacity, need)
    where = f"{_cores_text(capacity, cpus)} of {nodes_text(choice.cpu_nodes)}{_sharing_text(capacity, cpus)}"
    return Placement(
        vcpu_cpus=cpus,
        service_cpus=(),
        cpu_nodes=choice.cpu_nodes,
        memory_nodes=capacity.binding(choice.memory_nodes),
        exclusive=True,
        why=f"CPUs of its own: {where}{_drawbacks(capacity, choice, need)}",
    )


def _best_cpus(capacity: Capacity, need: PlacementRequest) -> tuple[_NodeChoice, tuple[int, ...]]:
    """The nodes and the exclusive CPUs that cost the least."""
    choices = _node_choices(capacity, need, capacity.free, need.vcpus)
    found = [
        (choice, _chosen_cpus(capacity, capacity.of_nodes(capacity.free, choice.cpu_nodes), need.vcpus))
        for choice in choices
    ]

    def cost(option: tuple[_NodeChoice, tuple[int, ...]]) -> tuple[object, ...]:
        choice, cpus = option
        return (*_harm_to_shared_vms(capacity, cpus, choice), *_cost(capacity, cpus))

    return min(found, key=cost)


def _chosen_cpus(capacity: Capacity, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of `cpus`, close to each other: chosen from wholly free cores or from all, whichever is better."""
    there = frozenset(cpus)
    whole = [cpu for cpu in cpus if capacity.cores[capacity.cpus[cpu].core] <= there]
    options = [_nearby(capacity, pool, count, LEVELS) for pool in (tuple(whole), cpus) if len(pool) >= count]
    return min(options, key=lambda option: _cost(capacity, option))


def _nearby(capacity: Capacity, cpus: tuple[int, ...], count: int, levels: tuple[str, ...]) -> tuple[int, ...]:
    """`count` of `cpus`, from the best group of the first level that has so many.

    If no group has, all of the largest group and the rest from other groups.
    """
    if not levels:
        return _from_cores(capacity, cpus, count)
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(getattr(capacity.cpus[cpu], levels[0]), []).append(cpu)
    if fitting := [tuple(group) for group in groups.values() if len(group) >= count]:
        options = [_nearby(capacity, group, count, levels[1:]) for group in fitting]
        return min(options, key=lambda option: _cost(capacity, option))
    largest = max(groups.values(), key=lambda group: (len(group), -group[0]))
    taken = frozenset(largest)
    rest = tuple(cpu for cpu in cpus if cpu not in taken)
    return tuple(sorted((*largest, *_nearby(capacity, rest, count - len(largest), levels))))


def _from_cores(capacity: Capacity, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of `cpus`: whole cores first, the rest from cores that are partly taken already, if there are any."""
    by_core: dict[int, list[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: not capacity.cpus[cpu].isolated):
        by_core.setdefault(capacity.cpus[cpu].core, []).append(cpu)
    whole = [core for core in by_core if len(by_core[core]) == len(capacity.cores[core])]
    parts = [core for core in by_core if core not in whole]
    chosen: list[int] = []
    for core in whole:
        if len(by_core[core]) <= count - len(chosen):
            chosen += by_core[core]
    for core in (*parts, *whole):
        chosen += [cpu for cpu in by_core[core] if cpu not in chosen][: count - len(chosen)]
    return tuple(sorted(chosen))


def _cost(capacity: Capacity, cpus: tuple[int, ...]) -> tuple[object, ...]:
    """The cost of an exclusive set, its gravest part first; the least is the best."""
    mixed = _shared_cores(capacity, cpus)
    left = []
    for level in reversed(LEVELS):
        touched = {getattr(capacity.cpus[cpu], level) for cpu in cpus}
        left.append(sum(capacity.free_of[level][group] for group in touched) - len(cpus))
    return (
        _groups(capacity, cpus, "socket"),
        _groups(capacity, cpus, "die"),
        len(mixed),
        _groups(capacity, cpus, "l3"),
        sum(not capacity.cpus[cpu].isolated for cpu in cpus),
        sum(capacity.cores[core] <= capacity.free for core in mixed),
        *left,
        cpus,
    )


def _shared_cores(capacity: Capacity, cpus: Iterable[int]) -> frozenset[int]:
    """Cores that the VM would share with others."""
    taken = frozenset(cpus)
    return frozenset(core for cpu in taken if not capacity.cores[core := capacity.cpus[cpu].core] <= taken)


def _groups(capacity: Capacity, cpus: Iterable[int], level: str) -> int:
    return len({getattr(capacity.cpus[cpu], level) for cpu in cpus})


def _harm_to_shared_vms(capacity: Capacity, cpus: tuple[int, ...], choice: _NodeChoice) -> tuple[object, ...]:
    """The harm to shared VMs: first the shared CPUs missing for one per vCPU, then whether none is left."""
    remaining = [capacity.of_nodes(capacity.shared - set(cpus), (node,)) for node in choice.cpu_nodes]
    missing = sum(
        max(Fraction(0), capacity.load[node] - len(left))
        for node, left in zip(choice.cpu_nodes, remaining, strict=True)
    )
    return missing, not any(remaining)


# ---- texts


def action_on(need: PlacementRequest, verb: str = "place") -> str:
    return f"{verb} sandbox '{need.sandbox_id}' ({need.name})"


def nodes_text(nodes: Iterable[int]) -> str:
    found = tuple(nodes)
    return f"node{'s' if len(found) > 1 else ''} {cpuset_text(found)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cores_text(capacity: Capacity, cpus: tuple[int, ...]) -> str:
    """The cores and threads that the CPUs are, and the smallest group that they are in."""
    split = _shared_cores(capacity, cpus)
    whole = len({capacity.cpus[cpu].core for cpu in cpus}) - len(split)
    threads = sum(capacity.cpus[cpu].core in split for cpu in cpus)
    parts = [_count(number, noun) for number, noun in ((whole, "whole core"), (threads, "thread")) if number]
    level = next((level for level in reversed(LEVELS) if _groups(capacity, cpus, level) == 1), None)
    if level is None:
        within = _count(_groups(capacity, cpus, "socket"), "socket")
    else:
        within = f"one {'L3' if level == 'l3' else level}"
    return f"{' and '.join(parts)} in {within}"


def _sharing_text(capacity: Capacity, cpus: tuple[int, ...]) -> str:
    split = _shared_cores(capacity, cpus)
    return f", sharing {_count(len(split), 'core')} with others" if split else ""


def _drawbacks(capacity: Capacity, choice: _NodeChoice, need: PlacementRequest) -> str:
    """The drawbacks of the nodes, as text."""
    if not choice.memory_nodes:
        return "; the memory of the nodes is unknown"
    if not choice.memory_fits:
        return f"; {need.memory_bytes // MIB} MiB are free on no nodes: memory from any"
    if choice.memory_nodes != choice.cpu_nodes:
        return f"; memory of {nodes_text(choice.memory_nodes)}"
    return "; no fewer nodes have the CPUs and the memory" if len(choice.cpu_nodes) > 1 else ""
