"""Listens at `agent.server_addr`, whose schemes are:

- `vsock://-1:PORT` listens on every context id, `unix://PATH` on a socket: any number of connections.
- `serial:///dev/virtio-ports/NAME`: one byte stream over a virtio-serial port, found by its name in sysfs, without
  udev.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Iterable
from typing import TypeAlias

from pyshim.ttrpc import Server

from guest.agent.errors import InvalidArgument
from guest.agent.files import names_in, read_text, remove_file
from guest.agent.streams import EdgeEvents

log = logging.getLogger(__name__)

_PORTS = "/sys/class/virtio-ports"
# Seconds between two looks for a port, in the first second and later: its driver may still be loading.
_FIND_AGAIN_S = 0.01
_FIND_LATER_S = 0.2
_EAGER_LOOKS = 100
_BACKLOG = 128

Buffer: TypeAlias = bytes | bytearray | memoryview


async def serve(server: Server, address: str) -> None:
    """Hosts are served at `address` until the server shuts down, or for ever on a port.

    Raises InvalidArgument for an address of another form, OSError if the agent cannot listen at it.
    """
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "serial" and rest:
        port = Port(await _open_port(rest))
        log.info("listening", extra={"address": address})
        await serve_port(server, port)
        return
    if separator and scheme == "vsock" and rest:
        listener = vsock_listener(rest, address)
    elif separator and scheme == "unix" and rest:
        listener = unix_listener(rest)
    else:
        raise InvalidArgument(f"listen on {address!r}: not vsock://, serial:// or unix://")
    log.info("listening", extra={"address": address})
    await server.serve(listener)


def vsock_listener(rest: str, address: str) -> socket.socket:
    """A listening vsock socket for `CID:PORT`; -1 is any context id."""
    cid_text, _, port_text = rest.partition(":")
    try:
        cid, port = int(cid_text), int(port_text)
    except ValueError:
        raise InvalidArgument(f"listen on {address!r}: want vsock://CID:PORT") from None
    listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listener.bind((socket.VMADDR_CID_ANY if cid < 0 else cid, port))
    listener.listen(_BACKLOG)
    return listener


def unix_listener(path: str) -> socket.socket:
    """A listening unix socket that only this user can connect to."""
    remove_file(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old)
    listener.listen(_BACKLOG)
    return listener


# -- virtio-serial -----------------------------------------------------------------------------------------------------


async def serve_port(server: Server, port: Port) -> None:
    """Hosts are served one after the other, for ever."""
    while True:
        await port.wait_for_host()
        await server.serve_connection(port)
        log.info("host disconnected, waiting for the next one")


async def _open_port(path: str) -> int:
    """An fd of the port, once it exists and is free: its driver may be late, or a former user still closing it."""
    looks = 0
    while True:
        node = find_port(path)
        try:
            if node is None:
                raise FileNotFoundError(2, "no such virtio port", path)
            return os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            looks += 1
            if looks == _EAGER_LOOKS:
                log.warning("virtio port is not there yet", extra={"path": path, "error": error})
        await asyncio.sleep(_FIND_AGAIN_S if looks < _EAGER_LOOKS else _FIND_LATER_S)


def find_port(path: str) -> str | None:
    """The device node of the virtio-serial port `path`: itself a node, or a path that ends in the port's name."""
    if os.path.exists(path):
        return path
    wanted = os.path.basename(path)
    for entry in names_in(_PORTS):
        try:
            name = read_text(f"{_PORTS}/{entry}/name").strip()
        except OSError:
            continue  # unplugged meanwhile, or it has no name
        if name == wanted:
            return f"/dev/{entry}"
    return None


class Port:
    """An open virtio-serial port with those methods of a socket that a ttrpc server uses. Owns `fd`.

    While no host is connected, the port reads as ended, polls as hung up and accepts no bytes. Then the server ends its
    connection; the port itself stays open for the next host. Source: the kernel's drivers/char/virtio_console.c.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, 0)

    def _has_host(self) -> bool:
        return not self._poll.poll(0)

    async def wait_for_host(self) -> None:
        """A host is connected."""
        changed = asyncio.Event()
        # A host that connects makes the port writable.
        news = EdgeEvents(self._fd, select.EPOLLIN | select.EPOLLOUT, changed.set)
        try:
            while not self._has_host():
                await changed.wait()
                changed.clear()
        finally:
            news.close()

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool, /) -> None:
        os.set_blocking(self._fd, flag)

    def recv_into(self, buffer: memoryview, /) -> int:
        return os.readv(self._fd, [buffer])

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        try:
            return os.writev(self._fd, list(buffers))
        except BlockingIOError:
            if self._has_host():
                raise
            raise ConnectionResetError("the host has disconnected") from None

    def close(self) -> None:
        """The connection of this host has ended."""
