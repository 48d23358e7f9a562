"""A machine as placement sees it: its CPUs, what they share, and the NUMA nodes they and the memory are of."""

from itertools import pairwise

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument


class MachineError(InvalidArgument):
    """The description of a machine contradicts itself."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """A logical CPU. `core`, `l3`, `die` and `socket` are numbers that no other such group of the machine has."""

    id: int
    core: int
    """SMT siblings have the same."""
    l3: int
    """CPUs that share a last-level cache have the same."""
    die: int
    socket: int
    node: int
    online: bool
    isolated: bool = False
    """The scheduler does not balance load on it (`isolcpus`): no use as a shared CPU, good as an exclusive one."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. One without CPUs is a device's memory or slower memory: no VM gets it."""

    id: int
    memory_bytes: int
    distances: tuple[int, ...]
    """To every node of the machine, in the order of `Machine.nodes`: the firmware's figures, 10 is itself."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpus: tuple[Cpu, ...]
    """Sorted by id."""
    nodes: tuple[Node, ...]
    """Sorted by id."""


def checked(machine: Machine) -> Machine:
    """`machine`, in the order of numbers. Raises MachineError for one that contradicts itself."""
    cpus = tuple(sorted(machine.cpus, key=lambda cpu: cpu.id))
    order = sorted(range(len(machine.nodes)), key=lambda at: machine.nodes[at].id)
    nodes = []
    for at in order:
        node = machine.nodes[at]
        if len(node.distances) != len(order):
            raise MachineError(f"read node {node.id}: {len(node.distances)} distances to {len(order)} nodes")
        nodes.append(replace(node, distances=tuple(node.distances[to] for to in order)))
    known = {node.id for node in nodes}
    for name, numbers in (("CPU", [cpu.id for cpu in cpus]), ("node", [node.id for node in nodes])):
        for number, next_number in pairwise(numbers):
            if number == next_number:
                raise MachineError(f"read {name} {number}: it is there twice")
    for cpu in cpus:
        if cpu.online and cpu.node not in known:
            raise MachineError(f"read CPU {cpu.id}: node {cpu.node} does not exist")
    if not any(cpu.online for cpu in cpus):
        raise MachineError("read machine: no CPU is online")
    return Machine(cpus=cpus, nodes=tuple(nodes))
