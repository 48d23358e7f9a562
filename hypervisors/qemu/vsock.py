"""The guest's vsock: a CID reserved in the host's kernel, or a program of the host that serves the device.

With vhost-vsock a CID is reserved as long as the descriptor is open on which it was set. Each VM has a vsock program of
its own, so all their guests have the same CID.
"""

import asyncio
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.host.processes.children import Child, Children
from pyshim.host.processes.launch import Isolation
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal, ResourceExhausted
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.vm import VhostUserVsockChannel

DEVICE = "/dev/vhost-vsock"
FIRST_CID = 3
"""0 to 2 are the hypervisor, loopback and the host: vsock(7)."""
LAST_CID = (1 << 32) - 2
"""2^32 - 1 is VMADDR_CID_ANY."""
_TRIES = 1000
_VHOST_VSOCK_SET_GUEST_CID = 0x4008AF60
_BUFFER_BYTES = 16 * 1024
"""Bytes that a connection of the guest may send ahead to the program, so none of its packets is larger. The program
takes a packet whose data are in one piece of memory. Linux since 6.17, and its stable releases such as 6.12.118, splits
one above 32 KiB, headers included: the program drops that, and the connection stalls. A power of two: the program
counts modulo 2^32. Source: virtio_vsock_alloc_skb in the kernel, from_tx_virtq_chain of the crate virtio-vsock 0.10."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.1
"""Seconds between attempts to connect to the program. It makes its socket itself and takes no listening descriptor."""


def set_guest_cid(fd: int, cid: int) -> None:
    fcntl.ioctl(fd, _VHOST_VSOCK_SET_GUEST_CID, struct.pack("=Q", cid))


def candidate_cids(start: int) -> Iterator[int]:
    """The CIDs to try: `start` and up to _TRIES above it, then up to _TRIES below it."""
    yield from range(start, min(start + _TRIES, LAST_CID + 1))
    yield from range(start - 1, max(start - _TRIES, FIRST_CID) - 1, -1)


def _random_cid() -> int:
    """Not by the module `random`: its import takes longer than the reservation."""
    return FIRST_CID + int.from_bytes(os.urandom(8)) % (LAST_CID - FIRST_CID + 1)


def reserve_cid(
    *, device: str = DEVICE, set_cid: Callable[[int, int], None] = set_guest_cid, start: int | None = None
) -> tuple[OwnedFd, int]:
    """(open vhost-vsock device, CID set on it). Raises FailedPrecondition or ResourceExhausted."""
    with os_errors(f"open {device!r}", hint="modprobe vhost_vsock"):
        vsock = OwnedFd(os.open(device, os.O_RDWR | os.O_CLOEXEC))
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


async def start_program(
    channel: VhostUserVsockChannel,
    children: Children,
    ledger: Ledger,
    *,
    isolation: Isolation,
    dumps_core: bool,
    timeout_s: float,
) -> tuple[Child, socket.socket]:
    """(the program, which serves the device; a connection to it for QEMU).

    Ledger: PROCESS under `channel.device_path`. Raises Internal with the program's output when it exits,
    DeadlineExceeded when it accepts no connection in time. It has ended after an error.
    """
    argv = (
        channel.program,
        f"--guest-cid={FIRST_CID}",
        f"--socket={channel.device_path}",
        f"--uds-path={channel.socket_path}",
        f"--tx-buffer-size={_BUFFER_BYTES}",
    )
    child = await children.spawn(
        argv, isolation=isolation, dumps_core=dumps_core, ledger=ledger, ledger_key=channel.device_path
    )
    try:
        async with asyncio.timeout(timeout_s):
            return child, await _connected(child, channel.device_path)
    except BaseException as error:
        await child.end()
        await ledger.release(LedgerEntry(kind=ResourceKind.PROCESS, key=channel.device_path))
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(
                f"start {channel.program!r}: it takes no connection at {channel.device_path!r} within {timeout_s:g} s"
            ) from error
        raise


async def _connected(child: Child, path: str) -> socket.socket:
    pause_s = _FIRST_PAUSE_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect(path)
            connection.setblocking(True)  # also for QEMU: the mode belongs to the open file
            return connection
        except OSError as error:
            connection.close()
            if child.exit is not None:
                raise Internal(f"serve the guest's vsock: {child.describe_exit()}") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
