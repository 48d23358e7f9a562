"""The host's free capacity for one more VM, which `resources/sizing/host.py` reads for each sandbox before its boot."""

from fractions import Fraction

import msgspec

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


class CapacityFacts(msgspec.Struct, frozen=True, kw_only=True):
    available_mib: int | None
    """MemAvailable of /proc/meminfo; None if the kernel does not report it."""
    swap_free_mib: int
    backing: RamBacking | None
    """None: guest RAM is ordinary pages."""
    cgroup: CgroupLimits
