"""System calls that Python 3.11 has no function for, through ctypes. All raise OSError naming the path."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_REMOUNT = 32
MS_MANDLOCK = 64
MS_DIRSYNC = 128
MS_NOSYMFOLLOW = 256
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_I_VERSION = 1 << 23
MS_STRICTATIME = 1 << 24
MS_LAZYTIME = 1 << 25
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_READ = 23
_SYS_OPENAT2 = 437  # the same number on every architecture that Debian runs on
RT_SIGTIMEDWAIT = {"x86_64": 128, "aarch64": 137, "riscv64": 137, "ppc64le": 176, "s390x": 177}.get(os.uname().machine)
"""The number of the call on this machine; None on an unknown one. Source: syscall tables of the kernel."""
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08
_RB_POWER_OFF = 0x4321FEDC


def _check(result: int, name: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def mount(source: str, target: str, fstype: str | None, flags: int, data: str) -> None:
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            os.fsencode(fstype) if fstype else None,
            ctypes.c_ulong(flags),
            os.fsencode(data) if data else None,
        ),
        target,
    )


def unmount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def become_subreaper() -> None:
    """Orphaned descendants become children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def has_capability(number: int) -> bool:
    """True if this process has the capability. Executed as root, it has its whole bounding set.

    Source: capabilities(7).
    """
    return _check(_libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) == 1


def swap_on(path: str) -> None:
    _check(_libc.swapon(os.fsencode(path), 0), path)


def power_off() -> None:
    _check(_libc.reboot(_RB_POWER_OFF))


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(root_fd: int, path: str, flags: int) -> int:
    """An fd for `path` below `root_fd`; EXDEV when the path, or a symlink on it, leads out. Source: openat2(2)."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    result = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2), root_fd, os.fsencode(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    )
    return _check(result, path)
