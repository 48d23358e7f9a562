"""Reaches the guest's agent at its address: a connected byte stream, then an answered health check.

A serial port needs no polling: bytes wait in the socket until the guest opens its end. The other forms are tried again
with growing pauses until the deadline, because their listener appears only once the guest has booted.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from pyshim.agent.client import AgentClient
from pyshim.concurrency.deadlines import MARGIN_S, within_s
from pyshim.model.errors import AgentGone, DeadlineExceeded, ShimError, Unavailable
from pyshim.model.guest import AgentAddress, HvsockAddress, SerialAddress, UnixAddress, VsockAddress
from pyshim.ttrpc.client import Client, connected_unix_socket

log = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.01, 0.5
_HANDSHAKE_BYTES = 64
"""Longest answer to CONNECT: `OK` and a port number fit."""
HANDSHAKE_S = 10.0
"""Seconds for one CONNECT, as in Kata: a back end may take one before the guest listens, and never answer it."""


def pause_s(waited_s: float) -> float:
    """Seconds until the next attempt, a tenth of the time waited: a guest boots in some hundred ms or in minutes."""
    return min(max(waited_s / 10, _LEAST_PAUSE_S), _MOST_PAUSE_S)


class Connector:
    """Connects agents; `client_of` makes the client of a connection."""

    def __init__(self, client_of: Callable[[Client], AgentClient]) -> None:
        self._client_of = client_of

    @within_s(lambda self, address, timeout_s: timeout_s + MARGIN_S, "connect agent '{address}'")
    async def connect(self, address: AgentAddress, timeout_s: float) -> AgentClient:
        """An agent that has answered its health check.

        Raises DeadlineExceeded naming the address and the last failure; Unavailable when the peer is not an agent.
        """
        last = "nothing answered"
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        deadline = began_s + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        return await self._attempt(address, deadline)
                    except (OSError, AgentGone) as exc:
                        last = str(exc)
                    await asyncio.sleep(pause_s(loop.time() - began_s))
        except (TimeoutError, DeadlineExceeded) as exc:
            raise DeadlineExceeded(f"connect agent at '{address}': no answer within {timeout_s:g} s ({last})") from exc

    async def _attempt(self, address: AgentAddress, deadline: float) -> AgentClient:
        sock = await open_stream(address)
        client = self._client_of(Client(sock))
        try:
            await client.check(max(deadline - asyncio.get_running_loop().time(), 0.001))
        except BaseException as exc:
            await client.close()
            if isinstance(exc, ShimError) and not isinstance(exc, AgentGone | DeadlineExceeded):
                raise Unavailable(f"connect agent at '{address}': {exc}") from exc
            raise
        return client


async def open_stream(address: AgentAddress) -> socket.socket:
    """A connected, non-blocking stream socket to `address`. Raises OSError."""
    match address:
        case UnixAddress(path) | SerialAddress(path):
            return await connected_unix_socket(path)
        case VsockAddress(cid, port):
            return await _connect_vsock(cid, port)
        case HvsockAddress(path, port):
            sock = await connected_unix_socket(path)
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    await _hybrid_handshake(sock, port)
            except BaseException as exc:
                sock.close()
                if isinstance(exc, TimeoutError):
                    raise ConnectionResetError(
                        f"the vsock back end did not answer CONNECT within {HANDSHAKE_S:g} s"
                    ) from exc
                raise
            return sock


async def _connect_vsock(cid: int, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (cid, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _hybrid_handshake(sock: socket.socket, port: int) -> None:
    """Asks the vsock back end for the guest's port: `CONNECT <port>`, answered by `OK <host port>`.

    Read byte by byte: what follows the line already belongs to the agent.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, b"CONNECT %d\n" % port)
    line = b""
    while not line.endswith(b"\n") and len(line) < _HANDSHAKE_BYTES and (byte := await loop.sock_recv(sock, 1)):
        line += byte
    if not line.startswith(b"OK ") or not line.endswith(b"\n"):
        raise ConnectionResetError(f"the vsock back end answered {line!r} instead of OK")
