"""How good placements are, in figures: the policy's beside those of CPUs taken in the order of their numbers.

The naive order is what a list of free CPUs gives without a look at the topology; memory is then where the CPUs are, as
the kernel would have it.
"""

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from pyshim.model.host_facts import Machine
from pyshim.model.units import MIB
from pyshim.node.nri.assignments import Assignments, PlacementRequest, place, release
from pyshim.node.nri.description import Description, machine
from tests.fakes.machines import ALL, need

_SIZES = (1, 2, 2, 4, 4, 8)
_FULL = 0.75
"""Of all CPUs: the node is as full as this when VMs begin to leave."""
_STEPS = 400
_SEED = 21

Taken = Mapping[str, tuple[int, ...]]
Chooser = Callable[["Story", PlacementRequest], tuple[tuple[int, ...], tuple[int, ...]]]


class Figures(NamedTuple):
    """Of all VMs that were placed together."""

    distance: float
    """Mean, of a vCPU to its memory; 10 is the own node."""
    spread: int
    """VMs on more nodes than they need."""
    l3s: int
    """VMs on more L3s than they need."""
    cores: int
    """VMs that share a core with another VM, beyond those that must."""

    def cells(self) -> str:
        return f"{self.distance:.1f} | {self.spread} | {self.l3s} | {self.cores}"


class Story:
    """VMs come and go, the same for each policy."""

    def __init__(self, of: Description) -> None:
        self.machine: Machine = machine(of)
        self.cpus = {cpu.id: cpu for cpu in self.machine.cpus if cpu.online}
        self.taken: dict[str, tuple[int, ...]] = {}
        self.assignments = Assignments(machine=self.machine, reserved=())

    def run(self, choose: Chooser) -> Figures:
        # Only `random()` gives the same numbers in every release of Python.
        dice = random.Random(_SEED)
        memory_mib = sum(node.memory_bytes for node in self.machine.nodes) // MIB // len(self.cpus) // 2
        distances: list[float] = []
        spread = l3s = cores = 0
        for step in range(_STEPS):
            size = _SIZES[int(dice.random() * len(_SIZES))]
            leaving = int(dice.random() * len(self.taken))
            if sum(map(len, self.taken.values())) + size > _FULL * len(self.cpus):
                for gone in sorted(self.taken)[leaving : leaving + 1]:
                    del self.taken[gone]
                    self.assignments = release(self.assignments, gone)
                continue
            asked = need(f"s{step:03}", size, memory_mib=memory_mib * size)
            chosen, memory = choose(self, asked)
            assert not set(chosen) & {cpu for had in self.taken.values() for cpu in had}
            distances += [self._distance(cpu, memory) for cpu in chosen]
            spread += self._count(chosen, "node") > self._least(size, "node")
            l3s += self._count(chosen, "l3") > self._least(size, "l3")
            cores += self._shares_a_core(chosen)
            self.taken[asked.sandbox_id] = chosen
        return Figures(distance=sum(distances) / len(distances), spread=spread, l3s=l3s, cores=cores)

    def _distance(self, cpu: int, memory: tuple[int, ...]) -> float:
        here = next(node for node in self.machine.nodes if node.id == self.cpus[cpu].node)
        order = [node.id for node in self.machine.nodes]
        return sum(here.distances[order.index(node)] for node in memory) / len(memory)

    def _count(self, chosen: tuple[int, ...], level: str) -> int:
        return len({getattr(self.cpus[cpu], level) for cpu in chosen})

    def _least(self, size: int, level: str) -> int:
        groups: dict[int, int] = {}
        for cpu in self.cpus.values():
            groups[getattr(cpu, level)] = groups.get(getattr(cpu, level), 0) + 1
        return -(-size // max(groups.values()))

    def _shares_a_core(self, chosen: tuple[int, ...]) -> bool:
        """With another VM, by more than the one CPU that an odd size leaves over."""
        mine = {self.cpus[cpu].core for cpu in chosen}
        others = {self.cpus[cpu].core for had in self.taken.values() for cpu in had}
        return len(mine & others) > len(chosen) % 2


def by_policy(story: Story, asked: PlacementRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    story.assignments = place(story.assignments, asked)
    placement = story.assignments.placements[asked.sandbox_id]
    with_memory = tuple(node.id for node in story.machine.nodes if node.memory_bytes)
    return placement.vcpu_cpus, placement.memory_nodes or with_memory


def by_number(story: Story, asked: PlacementRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    taken = {cpu for had in story.taken.values() for cpu in had}
    chosen = tuple([cpu for cpu in sorted(story.cpus) if cpu not in taken][: asked.vcpus])
    nodes = {story.cpus[cpu].node for cpu in chosen}
    memory = tuple(sorted(node.id for node in story.machine.nodes if node.id in nodes and node.memory_bytes))
    return chosen, memory or (0,)


@cache
def figures() -> dict[str, tuple[Figures, Figures]]:
    """By machine: the policy's and the naive order's."""
    return {name: (Story(of).run(by_policy), Story(of).run(by_number)) for name, of in ALL.items()}


def table() -> str:
    """As docs/NRI.md has it."""
    rows = [f"| {name} | {ours.cells()} | {naive.cells()} |" for name, (ours, naive) in figures().items()]
    return "\n".join(rows)
