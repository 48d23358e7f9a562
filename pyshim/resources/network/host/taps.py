"""Tap devices and vhost-net: the descriptors that become a VM's network card.

Source: the kernel's Documentation/networking/tuntap.rst; linux/if_tun.h.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pyshim.host import syscalls

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_MULTI_QUEUE = 0x0100
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_IFF_TUN_EXCL = 0x8000
_PRIVATE_DIRECTORY = "/run"
"""Any directory that exists: only this process sees the mount on it."""
_IFREQ = struct.Struct("16sH22x")
_NOT_OFFERED = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM})


def open_tap(name: str, queues: int) -> tuple[int, ...]:
    """The queues of the new tap `name` in the calling thread's network namespace; the fds are the caller's.

    It goes away with its last descriptor. Raises OSError; EBUSY when an interface of that name exists.
    """
    with closed_on_error() as fds:
        for queue in range(queues):
            fds.append(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            if queues > 1:
                # Not for a single queue: a VMM that opens such a tap by name must set the flag too.
                flags |= _IFF_MULTI_QUEUE
            if queue == 0:
                flags |= _IFF_TUN_EXCL
            fcntl.ioctl(fds[-1], _TUNSETIFF, _IFREQ.pack(name.encode(), flags))
        return tuple(fds)


def open_macvtap(device_number: int, queues: int) -> tuple[int, ...]:
    """The queues of the macvtap whose character device has that number; the fds are the caller's. Raises OSError.

    The calling process's mount namespace must be its own: the device gets a node in a file system that only it sees.
    A node that udev or devtmpfs made cannot be trusted, since it is named by an index that two namespaces may share.
    """
    syscalls.mount("tmpfs", _PRIVATE_DIRECTORY, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "size=64k")
    try:
        node = f"{_PRIVATE_DIRECTORY}/tap"
        os.mknod(node, stat.S_IFCHR | 0o600, device_number)
        with closed_on_error() as fds:
            for _ in range(queues):
                fds.append(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            return tuple(fds)
    finally:
        syscalls.umount2(_PRIVATE_DIRECTORY, syscalls.MNT_DETACH)


def macvtap_device_number(name: str, index: int) -> int:
    """The number of the macvtap's character device, from sysfs of the namespace the link is in. Raises OSError.

    As for `open_macvtap`, the calling process's mount namespace must be its own.
    """
    # A new mount of sysfs shows the links of the namespace it is made in.
    syscalls.mount("sysfs", _PRIVATE_DIRECTORY, "sysfs", syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NOEXEC)
    try:
        with open(f"{_PRIVATE_DIRECTORY}/class/net/{name}/tap{index}/dev", encoding="ascii") as file:
            major, minor = map(int, file.read().split(":"))
    finally:
        syscalls.umount2(_PRIVATE_DIRECTORY, syscalls.MNT_DETACH)
    return os.makedev(major, minor)


def leave_mount_namespace() -> None:
    """This process's mounts are its own: no other process sees those made from here on, and none outlives it."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)


def open_vhost_net(queues: int, *, device: str = "/dev/vhost-net") -> tuple[int, ...]:
    """One vhost-net fd per queue; empty where the host has none or refuses it; QEMU works without."""
    try:
        with closed_on_error() as fds:
            for _ in range(queues):
                fds.append(os.open(device, os.O_RDWR | os.O_CLOEXEC))
            return tuple(fds)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return ()
        raise


@contextmanager
def closed_on_error() -> Iterator[list[int]]:
    """A list for descriptors; those in it are closed if the block fails."""
    fds: list[int] = []
    try:
        yield fds
    except BaseException:
        close_fds(fds)
        raise


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
