"""The kernel's file systems, for an agent that is PID 1 with no init before it."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import Internal
from guest.agent.storage import mounts

_MOUNTS = (
    ("proc", "/proc", "proc", ["nosuid", "nodev", "noexec"]),
    ("sysfs", "/sys", "sysfs", ["nosuid", "nodev", "noexec"]),
    ("dev", "/dev", "devtmpfs", ["nosuid"]),
    ("devpts", "/dev/pts", "devpts", ["nosuid", "noexec", "gid=5", "mode=620", "ptmxmode=666"]),
    ("tmpfs", "/dev/shm", "tmpfs", ["nosuid", "nodev"]),
    ("tmpfs", "/run", "tmpfs", ["nosuid", "nodev", "mode=755"]),
    ("tmpfs", "/tmp", "tmpfs", ["nosuid", "nodev", "mode=1777"]),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", ["nosuid", "nodev", "noexec", "nsdelegate"]),
)


def mount_kernel_filesystems() -> None:
    """What a container runtime needs is mounted; what is mounted already, or cannot be, is left alone."""
    present: dict[str, str] = {}
    for source, target, fstype, options in _MOUNTS:
        if present.get(target) == fstype:
            continue
        try:
            os.makedirs(target, exist_ok=True)
            mounts.mount(source, target, fstype, options)
        except (Internal, OSError) as error:
            log.warning("not mounted", path=target, error=error)
        if target == "/proc":
            present = mounts.mount_types()
