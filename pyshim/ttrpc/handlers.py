"""What a service is made of: unary and streaming handlers, the context of a call, the server's end of a stream."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .framing import Buffer


class PeerCredentials(NamedTuple):
    """Who connected to a unix socket, as of its connect(2)."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, sock: socket.socket) -> PeerCredentials | None:
        """The peer's credentials, None when the socket is not a unix socket."""
        if sock.family != socket.AF_UNIX:
            return None
        layout = struct.Struct("=iII")
        return cls(*layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)))


class CallContext(NamedTuple):
    """What a handler may want to know about its call."""

    service: str
    method: str
    stream_id: int
    metadata: tuple[tuple[str, str], ...]
    deadline: float | None
    """Absolute, on the loop's monotonic clock; DEADLINE_EXCEEDED is answered then. None: the caller set no timeout."""
    peer: PeerCredentials | None

    def metadata_value(self, key: str) -> str | None:
        """The first value of this key; keys are lower case on the wire."""
        return next((value for name, value in self.metadata if name == key), None)


ImmediateFunction: TypeAlias = Callable[[bytes, CallContext], bytes]
UnaryFunction: TypeAlias = Callable[[bytes, CallContext], Awaitable[bytes]]
StreamFunction: TypeAlias = Callable[["ServerStream", CallContext], Awaitable[bytes | None]]


class UnaryHandler(NamedTuple):
    """A unary method. A bare function in a service table means `UnaryHandler(function)`.

    Neither the caller's timeout nor a dropped connection cancels a handler by default: ttrpc has no cancel message,
    callers give up and ask again, and work that changes something (a machine half started) must end in a known state,
    reply or no reply. Set `cancel_on_timeout` for handlers that only wait or compute and own nothing: both cancel
    these.
    """

    function: UnaryFunction
    cancel_on_timeout: bool = False


class ImmediateHandler(NamedTuple):
    """A unary method that waits for nothing: it is answered within the read that brought its request.

    It costs no task and no turn of the loop. While the outgoing queue is full it is called once there is room again.
    """

    function: ImmediateFunction
    cancel_on_timeout: bool = True
    """Before it was called nothing has happened yet."""


class StreamHandler(NamedTuple):
    """A streaming method. `function(stream, call)` returns None when the server streams, else the one reply.

    After the deadline or a dropped connection `stream.recv` and `stream.send` raise, which ends most functions; see
    UnaryHandler for why they are not cancelled.
    """

    function: StreamFunction
    client_streams: bool
    server_streams: bool
    cancel_on_timeout: bool = False


Handler: TypeAlias = UnaryFunction | UnaryHandler | ImmediateHandler | StreamHandler


class ServerStream:
    """The server's end of one stream, given to a StreamHandler. Iterating yields the client's messages to their end."""

    def __init__(
        self,
        recv: Callable[[], Awaitable[bytes | None]],
        send: Callable[[Buffer], Awaitable[None]],
    ) -> None:
        self._recv = recv
        self._send = send

    async def recv(self) -> bytes | None:
        """The client's next message; None when it closed its side.

        Raises DeadlineExceeded, ConnectionClosed, or RemoteProtocolError when the stream ended otherwise.
        """
        return await self._recv()

    async def send(self, message: Buffer) -> None:
        """The message is queued; waits while the connection's outgoing queue is full. Raises as `recv`."""
        await self._send(message)

    def __aiter__(self) -> ServerStream:
        return self

    async def __anext__(self) -> bytes:
        message = await self._recv()
        if message is None:
            raise StopAsyncIteration
        return message
