"""Facts of the host: its abilities, its free capacity, and the topology of its CPUs and memory.

Plans read these values, not the host. `resources/probe.py` and `resources/sizing/host.py` read them from it.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from pyshim.model.confidential import NO_TEE, TeeFacts
from pyshim.model.errors import InvalidArgument

UNBOUNDED_CPUS = 4096
"""The CPU count assumed for a remote VM's host, which is not known: the largest `default_maxvcpus`."""


class Accelerator(StrEnum):
    KVM = "kvm"
    TCG = "tcg"


class CgroupMode(StrEnum):
    V1 = "v1"
    V2 = "v2"
    NONE = "none"


class VirtiofsdFlavour(StrEnum):
    RUST = "rust"
    C = "c"


_SENDS_GROUPS_SINCE = (6, 3)
"""The version of Linux whose FUSE sends a supplementary group with a request that makes a file (virtio-fs)."""


def lacks_groups(release: str) -> bool:
    """True if a guest's kernel of this release (`6.1.0-56-cloud-amd64`) sends no supplementary groups.

    False if `release` does not begin with two numbers.
    """
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and tuple(int(number) for number in found.groups()) < _SENDS_GROUPS_SINCE


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    cpu_count: int
    cpu_cgroup: str = ""
    """The pod's cgroup that has only these CPUs; empty: the host has them."""
    memory_mib: int
    kvm_usable: bool
    kvm_reason: str
    """Why `kvm_usable` is as it is, for logs and errors."""
    vhost_vsock: bool
    vhost_net: bool
    nested: bool
    """The host is itself a virtual machine (/proc/cpuinfo has the flag `hypervisor`)."""
    cgroup_mode: CgroupMode
    systemd: bool
    tee: TeeFacts = NO_TEE
    tsc_khz: int = 0
    """The rate of the time stamp counter; 0 if the host does not report it."""
    hostname: str = ""
    """The node's host name; empty if it has none."""
    architecture: str = "x86_64"
    """Of its processor, as `uname -m` says it."""


def unbounded(host: HostFacts) -> HostFacts:
    """`host` without the limits that its CPUs and memory set: those of a remote VM are not on this host."""
    return replace(host, cpu_count=UNBOUNDED_CPUS, memory_mib=0)


HOST_SIDE_MIB = 206
"""MiB that one sandbox takes besides guest RAM, at most, with emulation. Measured as proportional set sizes, with one
container running: QEMU 7.2 up to 180 (with its translated code), virtiofsd 4, the shim 22."""
KVM_HOST_SIDE_MIB = 110
"""The same with KVM. Measured: the same QEMU takes 80 after the guest's boot, without translated code."""
REMOTE_HOST_SIDE_MIB = 25
"""The same for a remote VM, which leaves the shim. Measured with three containers running."""


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which limits of the host to read for a sandbox."""

    parent_cgroup: str
    """The parent of the sandbox's cgroup: a pod's cgroup."""
    hugepages: bool
    """Guest RAM is huge pages of the host's default size."""


class RamBacking(msgspec.Struct, frozen=True, kw_only=True):
    """A source of guest RAM other than ordinary pages."""

    name: str
    """For messages: `huge pages of 2 MiB`."""
    free_mib: int
    page_mib: int
    """Guest RAM must be a multiple of it; 1: any size."""


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest limits of a sandbox's parent cgroup and its ancestors; None without a limit."""

    memory_bytes: int | None
    memory_path: str
    """The cgroup that has this limit."""
    cpu_quota: Fraction | None
    """In CPUs: quota / period."""
    cpu_path: str
    cpus: frozenset[int] | None = None
    """The CPUs that the parent cgroup may use; None if no cpuset says."""
    cpus_path: str = ""


class CapacityFacts(msgspec.Struct, frozen=True, kw_only=True):
    available_mib: int | None
    """MemAvailable of /proc/meminfo; None if the kernel does not report it."""
    swap_free_mib: int
    backing: RamBacking | None
    """None: guest RAM is ordinary pages."""
    cgroup: CgroupLimits


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


def checked_machine(machine: Machine) -> Machine:
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


_MAX_CPUS = 8192
"""The kernel's largest NR_CPUS on x86-64."""
_WHOLE = re.compile(r"[0-9]{1,20}", re.ASCII)


def cpu_set(text: object, where: str) -> frozenset[int]:
    """The CPUs of a list such as `0-2,5`. Raises InvalidArgument naming `where`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"read {where}: not a list of CPUs: {str(text)[:100]!r}")
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        ends = (first, last if dash else first)
        if not all(_WHOLE.fullmatch(end) and int(end) < _MAX_CPUS for end in ends):
            raise InvalidArgument(f"read {where}: not a list of CPUs below {_MAX_CPUS}: {text[:100]!r}")
        cpus.update(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(cpus)


def known_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list such as `0-2,5`; empty for a malformed one."""
    with suppress(InvalidArgument):
        return cpu_set(text, "list of CPUs")
    return frozenset()


def cpuset_text(numbers: Iterable[int]) -> str:
    """The list form of `numbers`, such as `0-2,5`; empty without numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
