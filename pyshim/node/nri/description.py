"""A machine in a few numbers, for `pyshim nri plan`: sockets of dies of L3s of cores of threads, all alike."""

from itertools import product

import msgspec

from pyshim.model.decoding import decoded
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Cpu, Machine, MachineError, Node, cpu_set
from pyshim.model.host_facts import checked_machine as checked
from pyshim.model.units import MIB

MAX_CPUS = 8192
_MAX_NODES = 128
_MAX_FILE_BYTES = 1 << 20
_ITSELF, _SAME_SOCKET, _OTHER_SOCKET = 10, 12, 21
"""Distances as firmware gives them, where a description has none."""


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPUs are numbered as Linux does on x86-64: the first threads of all cores, then the second ones."""

    memory_mib: int | tuple[int, ...]
    """The memory of each node: one number for all, or a list."""
    cores: int
    """Cores of each L3."""
    sockets: int = 1
    dies: int = 1
    """In each socket."""
    l3s: int = 1
    """In each die."""
    threads: int = 1
    """In each core."""
    nodes: int = 1
    """In each socket: its cores in equal parts."""
    distances: tuple[tuple[int, ...], ...] = ()
    """A row for each node; the default is 10, 12 within a socket, 21 to another."""
    offline: int | str = ""
    """A list of CPUs: `3,8-11`."""
    isolated: int | str = ""


def read_description(path: str) -> Machine:
    """The machine that a YAML or JSON file describes. Raises OSError, and MachineError naming file and member."""
    import yaml

    with open(path, "rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise MachineError(f"read machine '{path}': larger than {_MAX_FILE_BYTES} bytes")
    try:
        return described(yaml.safe_load(data))
    except MachineError as error:
        raise MachineError(f"read machine '{path}': {str(error).partition(': ')[2]}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise MachineError(f"read machine '{path}': {' '.join(str(error).split())}") from error


def described(document: object) -> Machine:
    """The machine of a description, as JSON or YAML are read. Raises MachineError naming the member that is wrong."""
    return machine(decoded(document, Description, lambda problem: MachineError(f"read machine: {problem}")))


def machine(of: Description) -> Machine:
    """Raises MachineError naming the member that is wrong."""
    parts = ("sockets", "dies", "l3s", "cores", "threads", "nodes")
    for part in parts:
        if not 1 <= getattr(of, part) <= MAX_CPUS:
            raise MachineError(f"read machine: {part} is {getattr(of, part)}, not 1 to {MAX_CPUS}")
    in_socket = of.dies * of.l3s * of.cores
    cores = of.sockets * in_socket
    if cores * of.threads > MAX_CPUS:
        raise MachineError(f"read machine: {cores * of.threads} CPUs are more than {MAX_CPUS}")
    if of.sockets * of.nodes > _MAX_NODES:
        raise MachineError(f"read machine: {of.sockets * of.nodes} nodes are more than {_MAX_NODES}")
    if in_socket % of.nodes:
        raise MachineError(f"read machine: the {in_socket} cores of a socket are not {of.nodes} equal nodes")
    offline, isolated = (_list(of, name, cores * of.threads) for name in ("offline", "isolated"))
    cpus = [
        Cpu(
            id=thread * cores + core,
            core=core,
            l3=core // of.cores,
            die=core // (of.cores * of.l3s),
            socket=core // in_socket,
            node=core // (in_socket // of.nodes),
            online=thread * cores + core not in offline,
            isolated=thread * cores + core in isolated,
        )
        for thread, core in product(range(of.threads), range(cores))
    ]
    return checked(Machine(cpus=tuple(cpus), nodes=_nodes(of)))


def _list(of: Description, name: str, count: int) -> frozenset[int]:
    try:
        found = cpu_set(str(getattr(of, name)), f"machine: {name}")
    except InvalidArgument as error:
        raise MachineError(str(error)) from error
    if unknown := sorted(cpu for cpu in found if cpu >= count):
        raise MachineError(f"read machine: {name}: there is no CPU {unknown[0]}")
    return found


def _nodes(of: Description) -> tuple[Node, ...]:
    count = of.sockets * of.nodes
    sizes = (of.memory_mib,) * count if isinstance(of.memory_mib, int) else of.memory_mib
    rows = of.distances or tuple(tuple(_distance(of, one, other) for other in range(count)) for one in range(count))
    for name, found in (("memory_mib", len(sizes)), ("distances", len(rows))):
        if found != count:
            raise MachineError(f"read machine: {name} has {found} entries for {count} nodes")
    if min(sizes) < 0 or min(min(row, default=0) for row in rows) < 0:
        raise MachineError("read machine: memory_mib and distances are never below 0")
    return tuple(
        Node(id=number, memory_bytes=size * MIB, distances=row)
        for number, (size, row) in enumerate(zip(sizes, rows, strict=True))
    )


def _distance(of: Description, one: int, other: int) -> int:
    if one == other:
        return _ITSELF
    return _SAME_SOCKET if one // of.nodes == other // of.nodes else _OTHER_SOCKET
