"""The parts of a service: its handlers, and the context of a call."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias


class PeerCredentials(NamedTuple):
    """The process that connected to a unix socket, as of its connect(2)."""

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
    """A call as its handler sees it."""

    service: str
    method: str
    stream_id: int
    metadata: tuple[tuple[str, str], ...]
    """Keys are lower case on the wire."""
    deadline: float | None
    """Absolute, on the loop's monotonic clock; DEADLINE_EXCEEDED is answered then. None: the caller set no timeout."""
    peer: PeerCredentials | None


ImmediateFunction: TypeAlias = Callable[[bytes, CallContext], bytes]
UnaryFunction: TypeAlias = Callable[[bytes, CallContext], Awaitable[bytes]]


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

    It needs no task and no turn of the loop. While the outgoing queue is full it is called once there is room again.
    """

    function: ImmediateFunction
    cancel_on_timeout: bool = True
    """A call that still waits for room in the queue has changed nothing."""


Handler: TypeAlias = UnaryFunction | UnaryHandler | ImmediateHandler
