"""The system calls Python 3.11 does not offer, one thin function each, failing as OSError.

Import-light: `delete` uses it in an interpreter that lives for a tenth of a second. From 424 on every architecture has
the same numbers (Documentation/process/adding-syscalls.rst). Lower ones differ: `model/architecture.py` has them.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from pyshim.model.architecture import ARCHITECTURES, SystemCalls

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_REMOUNT = 32
MS_MANDLOCK = 64
MS_DIRSYNC = 128
MS_NOATIME = 1 << 10
MS_NODIRATIME = 1 << 11
MS_BIND = 1 << 12
MS_REC = 1 << 14
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR__ATIME = 0x70
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_STATX_BYTES = 256
_STATX_BTIME = 0x800
_STATX_MNT_ID = 0x1000
_STX_BTIME_OFFSET = 80
_STX_MNT_ID_OFFSET = 144
"""Source: struct statx in include/uapi/linux/stat.h; the same on every architecture."""

MADV_MERGEABLE = 12

IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_SYS_OPEN_TREE = 428
_INOTIFY_BYTES = 1 << 16
"""At least one event: a header of 16 bytes and a file name."""
CAP_DAC_OVERRIDE, CAP_IPC_LOCK = 1, 14
_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_BPF_ATTR_BYTES = 128
"""The kernel takes any size, if the members it does not know are zero."""
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_SECCOMP_INSTRUCTION_BYTES = 8
_SYS_MOVE_MOUNT = 429
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("instructions", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    def __init__(self) -> None:
        super().__init__(_CAPABILITY_VERSION_3, 0)


class _CapabilityPart(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


class _CapabilitySets(ctypes.Structure):
    _fields_ = (("parts", _CapabilityPart * 2),)


def _checked(result: int, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def _system_call(number: int, *arguments: object, path: str | None = None) -> int:
    """syscall(2). Numbers are passed as longs, of which the kernel reads as many bits as it needs."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), path)


def mount(source: str, target: str, fs_type: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    paths = (os.fsencode(source), os.fsencode(target), os.fsencode(fs_type))
    _checked(_libc.mount(*paths, ctypes.c_ulong(flags), os.fsencode(data) if data else None), target)


def umount2(target: str, flags: int) -> None:
    """umount2(2)."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), target)


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)."""
    _checked(_libc.pivot_root(os.fsencode(new_root), os.fsencode(put_old)), new_root)


def unshare(flags: int) -> None:
    """unshare(2), of the calling thread."""
    _checked(_libc.unshare(ctypes.c_int(flags)))


def setns(fd: int, kind: int) -> None:
    """setns(2), of the calling thread."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def limit_capabilities_of_programs(kept: Collection[int]) -> None:
    """Programs that this thread executes have no capability beside `kept`, and gain no right by an exec.

    Empties the bounding set, which only root can, and the inheritable one, which root's exec adds to it. Source:
    capabilities(7), "Transformation of capabilities during execve()"; prctl(2); capget(2), version 3.
    """
    held = _CapabilitySets()
    _checked(_libc.capget(ctypes.byref(_CapabilityHeader()), ctypes.byref(held)))
    for part in held.parts:
        part.inheritable = 0
    _checked(_libc.capset(ctypes.byref(_CapabilityHeader()), ctypes.byref(held)))
    for number in range(64):
        if number not in kept and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            if ctypes.get_errno() == errno.EINVAL:
                break  # after the last capability of this kernel
            if ctypes.get_errno() != errno.EPERM or os.geteuid() == 0:
                _checked(-1)
            break  # not root: there is nothing to lose
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def limit_capabilities_of_thread(kept: Collection[int]) -> None:
    """This thread, and those it starts, have no capability beside `kept`, which executed programs may still gain."""
    held = _CapabilitySets()
    _checked(_libc.capget(ctypes.byref(_CapabilityHeader()), ctypes.byref(held)))
    mask = sum(1 << number for number in kept)
    for index, part in enumerate(held.parts):
        part.permitted &= mask >> 32 * index & 0xFFFFFFFF
        part.effective &= part.permitted
    _checked(_libc.capset(ctypes.byref(_CapabilityHeader()), ctypes.byref(held)))


def _numbers() -> SystemCalls:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the numbers of the system calls of {machine} are not known")
    return ARCHITECTURES[machine].system_calls


def become_user(user_id: int, group_ids: Collection[int]) -> None:
    """This thread and the programs it executes run as this user and group, also in `group_ids`, without capabilities.

    By the system calls: the functions of libc change all threads of the process. The kernel then lets only root trace
    the process or take a core dump of it (credentials(7), prctl(2) PR_SET_DUMPABLE), until its next exec.
    """
    numbers = _numbers()
    groups = (ctypes.c_uint32 * len(group_ids))(*group_ids)
    _system_call(numbers.setgroups, len(group_ids), groups)
    _system_call(numbers.setresgid, user_id, user_id, user_id)
    _system_call(numbers.setresuid, user_id, user_id, user_id)


def filter_calls(program: bytes) -> None:
    """All threads of this process, and what they start, are bound by the program and gain no right by an exec.

    seccomp(2). Raises ESRCH when a thread has another filter.
    """
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    wanted = _FilterProgram(len(program) // _SECCOMP_INSTRUCTION_BYTES, program)
    if _system_call(_numbers().seccomp, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(wanted)):
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))


def bpf(command: int, request: bytes) -> int:
    """bpf(2) with the members of `union bpf_attr` that the command reads; the others are zero."""
    attr = ctypes.create_string_buffer(request, _BPF_ATTR_BYTES)
    return _system_call(_numbers().bpf, command, attr, len(attr))


def madvise(start: int, length: int, advice: int) -> None:
    """madvise(2), of memory by its address: `mmap` offers it for its own only."""
    _checked(_libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice)))


def inotify_init() -> int:
    """inotify_init1(2): a new close-on-exec fd, of which reads do not wait."""
    return _checked(_libc.inotify_init1(ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK)))


def inotify_add_watch(fd: int, path: str, events: int) -> None:
    """inotify_add_watch(2), of events IN_*."""
    _checked(_libc.inotify_add_watch(ctypes.c_int(fd), os.fsencode(path), ctypes.c_uint32(events)), path)


def inotify_drain(fd: int) -> bool:
    """True when `inotify_init`'s fd had an event; all are read."""
    found = False
    with suppress(BlockingIOError):
        while os.read(fd, _INOTIFY_BYTES):
            found = True
    return found


def openat2(directory_fd: int, path: str, flags: int, *, resolve: int) -> int:
    """openat2(2): a new close-on-exec fd; `resolve` limits the walk along the path."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    words = (directory_fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    while True:
        # EAGAIN: a rename raced with a ".." in the path; the manual page advises to try again.
        with suppress(BlockingIOError, InterruptedError):
            return _system_call(_SYS_OPENAT2, *words, path=path)


def open_tree(directory_fd: int, path: str, flags: int) -> int:
    """open_tree(2): a new close-on-exec fd for the mount at `path`; with OPEN_TREE_CLONE for a detached copy."""
    return _system_call(_SYS_OPEN_TREE, directory_fd, os.fsencode(path), flags | os.O_CLOEXEC, path=path)


def move_mount(from_fd: int, to_fd: int) -> None:
    """move_mount(2): the mount open at `from_fd` is attached on the file open at `to_fd`."""
    _system_call(_SYS_MOVE_MOUNT, from_fd, b"", to_fd, b"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)


def mount_setattr(fd: int, flags: int, *, attr_set: int = 0, attr_clr: int = 0, propagation: int = 0) -> None:
    """mount_setattr(2) on the mount open at `fd`."""
    attr = _MountAttr(attr_set, attr_clr, propagation, 0)
    _system_call(_SYS_MOUNT_SETATTR, fd, b"", flags | AT_EMPTY_PATH, ctypes.byref(attr), ctypes.sizeof(attr))


class Statx(NamedTuple):
    birth_ns: int
    """Nanoseconds since the epoch; 0 where the file system has no such time."""
    mount_id: int


def statx(path: str) -> Statx:
    """What statx(2) says of `path`, links followed, and os.stat does not."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    _checked(_libc.statx(AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME | _STATX_MNT_ID, buffer), path)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STX_BTIME_OFFSET)
    (mount_id,) = struct.unpack_from("=Q", buffer, _STX_MNT_ID_OFFSET)
    return Statx(seconds * 1_000_000_000 + nanoseconds, mount_id)


def file_system_magic(path: str) -> int:
    """statfs(2)'s f_type: which file system `path` is on."""
    # f_type is the first member, a long; the rest of struct statfs (120 bytes on 64 bit) is not looked at.
    buffer = (ctypes.c_long * 64)()
    _checked(_libc.statfs(os.fsencode(path), buffer), path)
    return int(buffer[0])
