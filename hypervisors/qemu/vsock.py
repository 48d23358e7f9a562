"""A guest CID of our own: the open vhost-vsock descriptor that has it set is the reservation."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator

from pyshim.host.fds import OwnedFd
from pyshim.host.processes.launch import describe_os_error
from pyshim.model.errors import FailedPrecondition, ResourceExhausted

DEVICE = "/dev/vhost-vsock"
FIRST_CID = 3
"""0 to 2 are the hypervisor, loopback and the host: vsock(7)."""
LAST_CID = (1 << 32) - 2
"""2^32 - 1 is VMADDR_CID_ANY."""
_TRIES = 1000
_VHOST_VSOCK_SET_GUEST_CID = 0x4008AF60


def set_guest_cid(fd: int, cid: int) -> None:
    fcntl.ioctl(fd, _VHOST_VSOCK_SET_GUEST_CID, struct.pack("=Q", cid))


def candidate_cids(start: int) -> Iterator[int]:
    """`start`, then upward, then downward: a bounded number of them."""
    yield from range(start, min(start + _TRIES, LAST_CID + 1))
    yield from range(start - 1, max(start - _TRIES, FIRST_CID) - 1, -1)


def _random_cid() -> int:
    """Of the kernel's making: the module `random` takes longer to import than all the rest to happen."""
    return FIRST_CID + int.from_bytes(os.urandom(8)) % (LAST_CID - FIRST_CID + 1)


def reserve_cid(
    *, device: str = DEVICE, set_cid: Callable[[int, int], None] = set_guest_cid, start: int | None = None
) -> tuple[OwnedFd, int]:
    """The device opened for this VM, and the CID it holds. Raises FailedPrecondition or ResourceExhausted."""
    try:
        vsock = OwnedFd(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise FailedPrecondition(f"open {device!r}: {describe_os_error(error)} (hint: modprobe vhost_vsock)") from error
    first = _random_cid() if start is None else start
    try:
        for cid in candidate_cids(first):
            try:
                set_cid(vsock.fileno(), cid)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise FailedPrecondition(
                        f"set guest cid {cid} on {device!r}: {describe_os_error(error)}"
                    ) from error
            else:
                return vsock, cid
    except BaseException:
        vsock.close()
        raise
    vsock.close()
    raise ResourceExhausted(f"reserve a guest cid on {device!r}: none free near {first}")
