"""What is placed on a machine, and what that leaves free. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import combinations

import msgspec

from pyshim.model.errors import ResourceExhausted
from pyshim.model.host_facts import Machine
from pyshim.model.sizing import Placement, PlacementRequest

LEVELS = ("node", "socket", "die", "l3")
"""The groups of CPUs, from far to near."""
_ALL_SETS_OF = 2
"""Up to this many nodes every set is tried; beyond it, only each node with its nearest neighbours."""


class PlacementError(ResourceExhausted):
    """The placement is not possible: too few free CPUs, or CPUs, nodes or VMs that are taken or do not exist."""


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A container outside our VMs."""

    container_id: str
    name: str
    """`NAMESPACE/POD/CONTAINER`, for people."""
    memory_bytes: int
    """Its request, 0 if unknown. It counts on all nodes in proportion to their size."""
    own_cpus: tuple[int, ...]
    """Its exclusive CPUs, from another manager (the kubelet's). If empty, it runs on the shared CPUs."""


class Assignments(msgspec.Struct, frozen=True, kw_only=True):
    """Everything placed on a machine. `place`, `release`, `keep` and `with_others` return a changed copy."""

    machine: Machine
    reserved: tuple[int, ...]
    """CPUs that never become exclusive, like the kubelet's `reservedSystemCPUs`; shared unless they are isolated."""
    needs: Mapping[str, PlacementRequest] = {}
    """By sandbox id."""
    placements: Mapping[str, Placement] = {}
    """By sandbox id."""
    others: Mapping[str, Other] = {}
    """By container id."""


class Capacity:
    """The CPUs and memory that a machine has free, for one decision. With `limit` a VM may be on these nodes only."""

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
        self.cpu_nodes = tuple(node for node in self.nodes if node in with_cpus)
        """Nodes that a VM may be on."""
        self.memory_nodes = tuple(node for node in self.cpu_nodes if self.nodes[node].memory_bytes > 0)
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
        """The number of CPUs that may become exclusive, by level and group."""
        return {level: Counter(getattr(self.cpus[cpu], level) for cpu in self.free) for level in LEVELS}

    @cached_property
    def load(self) -> Mapping[int, Fraction]:
        """vCPUs of shared VMs by node; those of a VM on several nodes are divided among them."""
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
            (self._assignments.needs[sandbox_id].memory_bytes, placement.memory_nodes or self.memory_nodes)
            for sandbox_id, placement in self._assignments.placements.items()
        ]
        uses += [(other.memory_bytes, self.memory_nodes) for other in self._assignments.others.values()]
        for used_bytes, nodes in uses:
            whole = sum(self.nodes[node].memory_bytes for node in nodes)
            for node in nodes:
                if whole:
                    found[node] -= Fraction(used_bytes * self.nodes[node].memory_bytes, whole)
        return found

    def free_memory(self, nodes: Iterable[int]) -> Fraction:
        """Free bytes of all `nodes` together."""
        return sum((self.free_bytes[node] for node in nodes), Fraction(0))

    def of_nodes(self, cpus: Iterable[int], nodes: Iterable[int]) -> tuple[int, ...]:
        wanted = frozenset(nodes)
        return tuple(sorted(cpu for cpu in cpus if self.cpus[cpu].node in wanted))

    def shared_of(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """The shared CPUs of `nodes`; if they have none, of the nearest node that has some."""
        if found := self.of_nodes(self.shared, nodes):
            return found
        near = sorted(self.cpu_nodes, key=lambda other: (min(self.distance(node, other) for node in nodes), other))
        return next((found for node in near if (found := self.of_nodes(self.shared, (node,)))), ())

    def distance(self, one: int, other: int) -> int:
        return self.nodes[one].distances[self._at[other]]

    def spread(self, nodes: Iterable[int]) -> tuple[int, int]:
        """The greatest distance between two of the nodes, and the sum of all distances."""
        found = [self.distance(one, other) for one, other in combinations(sorted(nodes), 2)]
        return max(found, default=0), sum(found)

    def memory_of(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """The nodes from which a VM on `nodes` gets its memory."""
        found = set()
        for node in nodes:
            if node in self.memory_nodes:
                found.add(node)
            elif self.memory_nodes:
                found.add(min(self.memory_nodes, key=lambda other: (self.distance(node, other), other)))
        return tuple(sorted(found))

    def binding(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """`nodes`; empty if no other node has memory, since there is nothing to bind."""
        return () if all(node.id in nodes for node in self.nodes.values() if node.memory_bytes > 0) else nodes

    def candidate_sets(self, size: int) -> Iterable[tuple[int, ...]]:
        """The sets of `size` nodes to compare, each in ascending order."""
        if size <= _ALL_SETS_OF:
            return combinations(self.cpu_nodes, size)
        return sorted({tuple(sorted(near[:size])) for near in self._neighbours})

    @cached_property
    def _neighbours(self) -> list[list[int]]:
        """Each node, and all others from near to far."""
        return [
            sorted(self.cpu_nodes, key=lambda other: (self.distance(node, other), other != node, other))
            for node in self.cpu_nodes
        ]
