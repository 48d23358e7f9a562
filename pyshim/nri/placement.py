"""Which CPUs and NUMA nodes a VM gets, from the machine's topology and what is taken; pure, and the same every time."""

from collections.abc import Iterable, Mapping

import msgspec

from pyshim.model.errors import InvalidArgument, ResourceExhausted
from pyshim.model.placement import Need, Placement

__all__ = [
    *("Assignments", "Cpu", "Machine", "MachineError", "Need", "Node", "Other", "Placement", "PlacementError"),
    *("keep", "place", "release", "shared_cpus", "with_others"),
]


class PlacementError(ResourceExhausted):
    """The machine has no room of the kind that is asked for."""


class MachineError(InvalidArgument):
    """A description of a machine contradicts itself."""


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


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. One without CPUs is a device's memory or slower memory: no VM gets it."""

    id: int
    memory_bytes: int
    distances: tuple[int, ...]
    """To every node of the machine, in the order of `Machine.nodes`: the firmware's figures, 10 is itself."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpus: tuple[Cpu, ...]
    """In the order of their ids."""
    nodes: tuple[Node, ...]
    """In the order of their ids."""


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A container that is in no VM of ours."""

    container_id: str
    name: str
    """`NAMESPACE/POD/CONTAINER`, for people."""
    memory_bytes: int
    """What it asked for, 0 where that is not known: counted on all nodes by their size."""
    own_cpus: tuple[int, ...]
    """CPUs that somebody else (the kubelet's CPU manager) gave it alone; empty: it runs on the shared CPUs."""


class Assignments(msgspec.Struct, frozen=True, kw_only=True):
    """All that is placed on a machine. `place`, `release`, `keep` and `with_others` make the next one."""

    machine: Machine
    reserved: tuple[int, ...]
    """Never exclusive, like the kubelet's `reservedSystemCPUs`; they are shared CPUs."""
    needs: Mapping[str, Need] = {}
    """By sandbox id."""
    placements: Mapping[str, Placement] = {}
    """By sandbox id."""
    others: Mapping[str, Other] = {}
    """By container id."""


def place(assignments: Assignments, need: Need) -> Assignments:
    """`need` has a placement; those of shared VMs have followed. The same need again changes nothing.

    Raises PlacementError when there are not enough CPUs, InvalidArgument for a need that is none.
    """
    raise NotImplementedError


def release(assignments: Assignments, sandbox_id: str) -> Assignments:
    """The sandbox has no placement any more; shared VMs use its CPUs. Nothing changes when it had none."""
    raise NotImplementedError


def keep(assignments: Assignments, need: Need, placement: Placement) -> Assignments:
    """`need` has the vCPU CPUs and the nodes of `placement`, which it had before this process started.

    Raises PlacementError when a CPU of it is offline, reserved or taken.
    """
    raise NotImplementedError


def with_others(assignments: Assignments, others: Iterable[Other]) -> Assignments:
    """`others` are the containers in no VM; shared VMs have followed."""
    raise NotImplementedError


def shared_cpus(assignments: Assignments) -> tuple[int, ...]:
    """The online CPUs that nobody has alone: what all other containers run on."""
    raise NotImplementedError
