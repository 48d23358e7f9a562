"""The host's free capacity for one more VM, read by `resources/sizing/host.py` just before the boot.

Unlike `HostFacts` these change from second to second: they are read once for each sandbox and never kept.
"""

from fractions import Fraction

import msgspec

HOST_SIDE_MIB = 206
"""MiB that one sandbox takes beside guest RAM, at most. Measured with emulation, proportional set sizes, one container
running: QEMU 7.2 up to 180 (its translated code included), virtiofsd 4, the shim 22."""
KVM_HOST_SIDE_MIB = 110
"""The same with KVM, where QEMU translates no code: without that code the same QEMU has 80, after a guest's boot."""
REMOTE_HOST_SIDE_MIB = 25
"""The same where the VM is not on the node: the shim, measured with three containers running."""


class CapacityQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the host that limit this sandbox."""

    parent_cgroup: str
    """The cgroup above the sandbox's own: a pod's."""
    hugepages: bool
    """Guest RAM is huge pages of the host's default size."""


class RamBacking(msgspec.Struct, frozen=True, kw_only=True):
    """The source of guest RAM, where that is not plain memory."""

    name: str
    """The source's name in messages: `huge pages of 2 MiB`."""
    free_mib: int
    page_mib: int
    """RAM has to be a multiple of it; 1 where any size will do."""


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest limits over a sandbox's parent cgroup (a pod's) and all above it; None without a limit."""

    memory_bytes: int | None
    memory_path: str
    """The cgroup whose limit that is."""
    cpu_quota: Fraction | None
    """CPUs: quota / period."""
    cpu_path: str


class CapacityFacts(msgspec.Struct, frozen=True, kw_only=True):
    available_mib: int | None
    """MemAvailable; None when the kernel does not say."""
    swap_free_mib: int
    backing: RamBacking | None
    """None: guest RAM is a memfd of ordinary pages."""
    cgroup: CgroupLimits
