"""Mounts with option words, as mount(8) has them, and reads the mount table."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from guest.agent import syscalls as sys
from guest.agent.errors import Internal, InvalidArgument, os_cause
from guest.agent.files import read_text

log = logging.getLogger(__name__)

# option word -> (flags to set, flags to clear)
_FLAG_WORDS: dict[str, tuple[int, int]] = {
    "async": (0, sys.MS_SYNCHRONOUS),
    "atime": (0, sys.MS_NOATIME),
    "bind": (sys.MS_BIND, 0),
    "defaults": (0, 0),
    "dev": (0, sys.MS_NODEV),
    "diratime": (0, sys.MS_NODIRATIME),
    "dirsync": (sys.MS_DIRSYNC, 0),
    "exec": (0, sys.MS_NOEXEC),
    "iversion": (sys.MS_I_VERSION, 0),
    "lazytime": (sys.MS_LAZYTIME, 0),
    "mand": (sys.MS_MANDLOCK, 0),
    "noatime": (sys.MS_NOATIME, 0),
    "nodev": (sys.MS_NODEV, 0),
    "nodiratime": (sys.MS_NODIRATIME, 0),
    "noexec": (sys.MS_NOEXEC, 0),
    "noiversion": (0, sys.MS_I_VERSION),
    "nolazytime": (0, sys.MS_LAZYTIME),
    "nomand": (0, sys.MS_MANDLOCK),
    "norelatime": (0, sys.MS_RELATIME),
    "nostrictatime": (0, sys.MS_STRICTATIME),
    "nosuid": (sys.MS_NOSUID, 0),
    "nosymfollow": (sys.MS_NOSYMFOLLOW, 0),
    "rbind": (sys.MS_BIND | sys.MS_REC, 0),
    "relatime": (sys.MS_RELATIME, 0),
    "remount": (sys.MS_REMOUNT, 0),
    "ro": (sys.MS_RDONLY, 0),
    "rw": (0, sys.MS_RDONLY),
    "strictatime": (sys.MS_STRICTATIME, 0),
    "suid": (0, sys.MS_NOSUID),
    "sync": (sys.MS_SYNCHRONOUS, 0),
}
_PROPAGATION_WORDS = {
    "private": sys.MS_PRIVATE,
    "rprivate": sys.MS_PRIVATE | sys.MS_REC,
    "shared": sys.MS_SHARED,
    "rshared": sys.MS_SHARED | sys.MS_REC,
    "slave": sys.MS_SLAVE,
    "rslave": sys.MS_SLAVE | sys.MS_REC,
    "unbindable": sys.MS_UNBINDABLE,
    "runbindable": sys.MS_UNBINDABLE | sys.MS_REC,
}
# mount(2) takes one page of options with its terminating zero.
_MAX_DATA_BYTES = 4095
# Seconds to try a mount again while a module is being loaded; seconds between two tries; tries while no module is being
# loaded.
_DRIVER_WAIT_S = 30.0
_DRIVER_PAUSE_S = 0.02
_SPARE_TRIES = 3
# An agent that is process 1 from the start mounts these, as in Kata's own images.
_KERNEL_FILESYSTEMS = (
    ("proc", "/proc", "proc", ["nosuid", "nodev", "noexec"]),
    ("sysfs", "/sys", "sysfs", ["nosuid", "nodev", "noexec"]),
    ("dev", "/dev", "devtmpfs", ["nosuid"]),
    ("devpts", "/dev/pts", "devpts", ["nosuid", "noexec", "gid=5", "mode=620", "ptmxmode=666"]),
    ("tmpfs", "/dev/shm", "tmpfs", ["nosuid", "nodev"]),
    ("tmpfs", "/run", "tmpfs", ["nosuid", "nodev", "mode=755"]),
    ("tmpfs", "/tmp", "tmpfs", ["nosuid", "nodev", "mode=1777"]),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", ["nosuid", "nodev", "noexec", "nsdelegate"]),
)


class MountOptions:
    """Option words as arguments of mount(2): `flags`, `propagation` (for a second call; 0: none) and `data`."""

    __slots__ = ("data", "flags", "propagation")

    def __init__(self, words: Iterable[str]) -> None:
        self.flags = 0
        self.propagation = 0
        data = []
        for word in (part for item in words for part in item.split(",") if part):
            if word in _FLAG_WORDS:
                set_flags, clear_flags = _FLAG_WORDS[word]
                self.flags = (self.flags | set_flags) & ~clear_flags
            elif word in _PROPAGATION_WORDS:
                self.propagation = _PROPAGATION_WORDS[word]
            else:
                data.append(word)
        self.data = ",".join(data)
        if len(self.data) > _MAX_DATA_BYTES:
            raise InvalidArgument(f"mount options: {len(self.data)} bytes, the kernel takes {_MAX_DATA_BYTES}")


def mount(source: str, target: str, fstype: str, words: Iterable[str]) -> None:
    """`source` is mounted on the existing `target` with option `words`. A bind with flags takes a second call."""
    words = list(words)
    if "\0" in source + target + fstype + "".join(words):
        raise InvalidArgument(f"mount {source!r} on {target!r}: NUL byte in an argument")
    options = MountOptions(words)
    flags = options.flags | (sys.MS_BIND if fstype in ("bind", "rbind") else 0)
    if fstype == "rbind":
        flags |= sys.MS_REC
    try:
        if flags & sys.MS_BIND and not flags & sys.MS_REMOUNT:
            sys.mount(source, target, None, flags & (sys.MS_BIND | sys.MS_REC), "")
            if flags & ~(sys.MS_BIND | sys.MS_REC):
                sys.mount(source, target, None, flags | sys.MS_REMOUNT, "")
        else:
            _mount_when_driver_is_loaded(source, target, fstype, flags, options.data)
        if options.propagation:
            sys.mount("none", target, None, options.propagation, "")
    except OSError as error:
        raise Internal(f"mount {source!r} ({fstype}) on {target!r}: {os_cause(error)}") from error
    fields = {"source": source, "target": target, "fstype": fstype, "options": ",".join(words)}
    log.debug("mounted", extra=fields)


def _mount_when_driver_is_loaded(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    """mount(2), tried again while the kernel does not know `fstype` and a module is being loaded.

    `load_drivers` loads modules while the agent runs. The kernel asks modprobe for a file system it does not know;
    modprobe fails at once for a module that is being loaded at that moment, and mount(2) answers ENODEV.
    """
    spare = _SPARE_TRIES
    deadline = time.monotonic() + _DRIVER_WAIT_S
    while True:
        try:
            return sys.mount(source, target, fstype, flags, data)
        except OSError as error:
            spare -= not _is_module_loading()
            if error.errno != errno.ENODEV or spare < 0 or time.monotonic() > deadline:
                raise
        time.sleep(_DRIVER_PAUSE_S)


def _is_module_loading() -> bool:
    try:
        return " Loading " in read_text("/proc/modules")
    except OSError:
        return False


def unmount(target: str) -> None:
    """Everything mounted at `target` is detached. Nothing happens if it is not a mount point."""
    while True:
        try:
            sys.unmount(target, sys.MNT_DETACH | sys.UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise Internal(f"unmount {target!r}: {os_cause(error)}") from error
            return


class Mounted(NamedTuple):
    source: str
    fstype: str


def mounted() -> dict[str, Mounted]:
    """Mount point -> the topmost file system there."""
    found = {}
    for line in read_text("/proc/self/mounts").split("\n"):
        fields = line.split(" ")
        if len(fields) >= 3:
            found[_unescaped(fields[1])] = Mounted(_unescaped(fields[0]), fields[2])
    return found


def mounted_below(folder: str) -> list[str]:
    """The mount points below `folder`, the deepest first."""
    return sorted((point for point in mounted() if point.startswith(f"{folder}/")), reverse=True)


def mounted_type(point: str) -> str:
    """The type of the topmost file system at a mount point; empty if nothing is mounted there."""
    found = mounted().get(point)
    return found.fstype if found is not None else ""


def _unescaped(path: str) -> str:
    if "\\" not in path:
        return path
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def make_target(source: str, target: str, fstype: str) -> None:
    """`target` exists: a directory, or an empty file where a file is to be bind mounted."""
    if fstype in ("bind", "rbind") and os.path.exists(source) and not os.path.isdir(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    else:
        os.makedirs(target, exist_ok=True)


def mount_kernel_filesystems() -> None:
    """The file systems that a container runtime needs are mounted. Failures are logged."""
    present: dict[str, Mounted] = {}
    for source, target, fstype, options in _KERNEL_FILESYSTEMS:
        if target in present and present[target].fstype == fstype:
            continue
        try:
            os.makedirs(target, exist_ok=True)
            mount(source, target, fstype, options)
        except (Internal, OSError) as error:
            log.warning("not mounted", extra={"path": target, "error": error})
        if target == "/proc":
            present = mounted()
