"""Reads the machine's CPUs and NUMA nodes from `/sys/devices/system`. A group has the number of its first online CPU.

Sources: the kernel's admin-guide/cputopology.rst, ABI/stable/sysfs-devices-system-cpu and -node.
"""

import re
from collections.abc import Awaitable, Callable, Mapping

from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Cpu, Machine, MachineError, Node, cpu_set
from pyshim.model.host_facts import checked_machine as checked

_MAX_FILE_BYTES = 1 << 16
_UNKNOWN = -1
"""The groups of an offline CPU, which the kernel does not show."""
_CORE = ("core_cpus_list", "thread_siblings_list")
_CLUSTER = ("cluster_cpus_list",)
_DIE = ("die_cpus_list",)
_SOCKET = ("package_cpus_list", "core_siblings_list")
"""Names of one file each: since Linux 5.3, and before."""
_CACHES = tuple(f"index{number}" for number in range(8))
"""x86 has up to five."""
_DISTANCE = re.compile(r"[0-9]{1,9}", re.ASCII)
_TOTAL = re.compile(r"MemTotal:\s+([0-9]{1,15})\s*kB", re.ASCII)

ReadMachine = Callable[[], Awaitable[Machine]]
"""`read_machine` in a thread. Raises MachineError, or DeadlineExceeded."""
Files = Mapping[str, str]
"""The text of each file that exists, by its path below `/sys/devices/system`."""


def read_machine(*, sys_root: str = "/sys", proc_root: str = "/proc") -> Machine:
    """The machine as it is now. Raises MachineError naming the file that is missing or malformed."""
    top = f"{sys_root}/devices/system"
    files: dict[str, str] = {}
    _read(files, top, "cpu/online", "cpu/present", "cpu/isolated", "node/online")
    for cpu in _list(files, "cpu/online"):
        _read(files, top, *(f"cpu/cpu{cpu}/topology/{name}" for name in (*_CORE, *_CLUSTER, *_DIE, *_SOCKET)))
        _read(files, top, *(path for at in _CACHES for path in _cache(cpu, at)))
    if "node/online" in files:
        for node in _list(files, "node/online"):
            _read(files, top, *(f"node/node{node}/{name}" for name in ("cpulist", "meminfo", "distance")))
    else:
        _read(files, proc_root, "meminfo")
    return machine_of(files)


def machine_of(files: Files) -> Machine:
    """The machine that `files` show. If the kernel shows no nodes, all CPUs are of node 0.

    Raises MachineError naming the file that is missing or malformed.
    """
    online = _list(files, "cpu/online")
    present = _list(files, "cpu/present") if "cpu/present" in files else online
    if "node/online" in files:
        numbers = sorted(_list(files, "node/online"))
        nodes = tuple(_node(files, number) for number in numbers)
        homes = {cpu: number for number in numbers for cpu in _list(files, f"node/node{number}/cpulist")}
    else:
        nodes = (Node(id=0, memory_bytes=_total_bytes(files, "meminfo"), distances=(10,)),)
        homes = dict.fromkeys(online, 0)
    if homeless := online - homes.keys():
        raise MachineError(f"read 'node/node*/cpulist': CPU {min(homeless)} is online and of no node")
    isolated = _list(files, "cpu/isolated") if "cpu/isolated" in files else frozenset()
    cpus = [_cpu(files, cpu, homes[cpu], isolated=cpu in isolated) for cpu in online]
    cpus += [
        Cpu(id=cpu, core=_UNKNOWN, l3=_UNKNOWN, die=_UNKNOWN, socket=_UNKNOWN, node=_UNKNOWN, online=False)
        for cpu in present - online
    ]
    return checked(Machine(cpus=tuple(cpus), nodes=nodes))


def _node(files: Files, number: int) -> Node:
    path = f"node/node{number}/distance"
    words = _text(files, path).split()
    if not words or not all(_DISTANCE.fullmatch(word) for word in words):
        raise MachineError(f"read '{path}': not a row of distances: {_shown(files[path])}")
    memory_bytes = _total_bytes(files, f"node/node{number}/meminfo")
    return Node(id=number, memory_bytes=memory_bytes, distances=tuple(int(word) for word in words))


def _total_bytes(files: Files, path: str) -> int:
    found = _TOTAL.search(_text(files, path))
    if found is None:
        raise MachineError(f"read '{path}': no line MemTotal in kB: {_shown(files[path])}")
    return int(found[1]) * 1024


def _cpu(files: Files, cpu: int, node: int, *, isolated: bool) -> Cpu:
    core = _together(files, cpu, _CORE)
    socket = _together(files, cpu, _SOCKET)
    for group, names in ((core, _CORE), (socket, _SOCKET)):
        if not group:
            raise MachineError(f"read 'cpu/cpu{cpu}/topology/{names[0]}': it is missing")
    die = _together(files, cpu, _DIE) or socket
    # Without an L3 cache, as on some ARM machines, the cores of a cluster share the most.
    cluster = _together(files, cpu, _CLUSTER)
    l3 = _sharing_l3(files, cpu) or (cluster if len(cluster) > len(core) else die)
    return Cpu(
        id=cpu,
        core=min(core),
        l3=min(l3),
        die=min(die),
        socket=min(socket),
        node=node,
        online=True,
        isolated=isolated,
    )


def _together(files: Files, cpu: int, names: tuple[str, ...]) -> frozenset[int]:
    """The CPUs of the group to which `cpu` belongs; empty if the kernel does not show the group."""
    paths = (f"cpu/cpu{cpu}/topology/{name}" for name in names)
    return next((_group(files, path, cpu) for path in paths if path in files), frozenset())


def _sharing_l3(files: Files, cpu: int) -> frozenset[int]:
    for at in _CACHES:
        level, shared = _cache(cpu, at)
        if files.get(level, "").strip() == "3" and shared in files:
            return _group(files, shared, cpu)
    return frozenset()


def _cache(cpu: int, at: str) -> tuple[str, str]:
    return f"cpu/cpu{cpu}/cache/{at}/level", f"cpu/cpu{cpu}/cache/{at}/shared_cpu_list"


def _group(files: Files, path: str, cpu: int) -> frozenset[int]:
    found = _list(files, path)
    if cpu not in found:
        raise MachineError(f"read '{path}': CPU {cpu} is not in it: {_shown(files[path])}")
    return found


def _list(files: Files, path: str) -> frozenset[int]:
    try:
        return cpu_set(_text(files, path), f"'{path}'")
    except InvalidArgument as error:
        raise MachineError(str(error)) from error


def _text(files: Files, path: str) -> str:
    if path not in files:
        raise MachineError(f"read '{path}': it is missing")
    return files[path]


def _shown(text: str) -> str:
    return repr(text[:100])


def _read(files: dict[str, str], top: str, *paths: str) -> None:
    """Adds the text of each readable file to `files`."""
    for path in paths:
        try:
            with open(f"{top}/{path}", encoding="utf-8", errors="replace") as file:
                files[path] = file.read(_MAX_FILE_BYTES)
        except OSError:
            continue
