"""A machine's topology, for the placement of VMs: its CPUs, their caches, dies and sockets, and its NUMA nodes."""

from itertools import pairwise

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument


class MachineError(InvalidArgument):
    """The topology contradicts itself."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """A logical CPU. `core`, `l3`, `die` and `socket` are group numbers, each unique in the whole machine."""

    id: int
    core: int
    """Equal for SMT siblings."""
    l3: int
    """Equal for CPUs that share a last-level cache."""
    die: int
    socket: int
    node: int
    online: bool
    isolated: bool = False
    """The scheduler does not balance load on it (`isolcpus`), so it is only used as an exclusive CPU."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. No VM gets a node without CPUs: its memory is a device's, or slower."""

    id: int
    memory_bytes: int
    distances: tuple[int, ...]
    """The firmware's distance to every node, in the order of `Machine.nodes`; 10 to itself."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpus: tuple[Cpu, ...]
    """Sorted by id."""
    nodes: tuple[Node, ...]
    """Sorted by id."""


def checked(machine: Machine) -> Machine:
    """`machine` with CPUs and nodes sorted by id. Raises MachineError if it contradicts itself."""
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
