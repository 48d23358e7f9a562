"""One connection of a server: its protocol core, its link, its calls, and the handlers that answer them."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import NamedTuple, TypeAlias

from .connection import Event, RequestReceived, RequestRefused, ServerConnection
from .framing import Buffer
from .link import ByteStream, Link
from .status import CallTimedOut, Code, ConnectionClosed, TtrpcError


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


_Found: TypeAlias = UnaryHandler | ImmediateHandler
_QUOTED_CHARS = 128
"""Characters of a peer's service or method name that an error quotes."""


class SessionLimits(NamedTuple):
    """Bounds of one connection."""

    message_bytes: int
    in_flight: int
    in_flight_bytes: int
    queue_bytes: int
    answers_at_deadline: bool


class _Call:
    """A running handler. Its stream may be over before it: after a deadline, a refusal, a dropped connection."""

    __slots__ = ("context", "handler", "payload_bytes", "task", "timer")

    def __init__(self, handler: _Found, context: CallContext, payload_bytes: int) -> None:
        self.handler = handler
        self.context = context
        self.payload_bytes = payload_bytes
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def stream_id(self) -> int:
        return self.context.stream_id

    @property
    def name(self) -> str:
        return f"{self.context.service}/{self.context.method}"


class Session:
    """Answers the requests of one connection, in whatever order they finish; each but an immediate one has a task."""

    def __init__(
        self,
        sock: socket.socket | ByteStream,
        *,
        services: Mapping[str, Mapping[str, Handler]],
        limits: SessionLimits,
        log: logging.Logger,
        spawn: Callable[[Coroutine[object, object, None], str], asyncio.Task[None]],
        is_draining: Callable[[], bool],
        on_closed: Callable[[Session], None],
    ) -> None:
        """It owns this connected socket, or stream with a socket's methods.

        `spawn` starts a handler's task, which may outlive the connection. While `is_draining`, requests are refused.
        """
        self._services = services
        self._limits = limits
        self._spawn = spawn
        self._is_draining = is_draining
        self._on_session_closed = on_closed
        self._peer = PeerCredentials.of(sock) if isinstance(sock, socket.socket) else None
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._core = ServerConnection(max_message_bytes=limits.message_bytes, max_open_streams=limits.in_flight)
        self._link = Link(
            self._core,
            sock,
            on_events=self._on_events,
            on_closed=self._on_closed,
            queue_bytes=limits.queue_bytes,
            hold_when_full=True,
        )
        self._calls: dict[int, _Call] = {}
        self._in_flight_bytes = 0

    def start(self) -> None:
        self._link.start()

    def close(self) -> None:
        """The connection is closed at once. Idempotent."""
        self._link.close()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._link.closed)

    async def flush_and_close(self, timeout_s: float) -> None:
        """Queued replies are with the kernel, or the time is up; then the connection is closed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._link.flush()
        except TimeoutError:
            self._log.warning("replies dropped", extra={"bytes": self._link.queued_bytes})
        finally:
            self._link.close()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestReceived):
                self._on_request(event)
            elif isinstance(event, RequestRefused):
                self._on_refused(event)

    def _on_request(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        found = self._find(event)
        if isinstance(found, TtrpcError):
            self._answer(stream_id, found.code, found.message)
            return
        timeout_s = event.timeout_ns / 1e9
        deadline = self._loop.time() + timeout_s if event.timeout_ns else None
        context = CallContext(event.service, event.method, stream_id, event.metadata, deadline, self._peer)
        call = _Call(found, context, len(event.payload))
        if isinstance(found, ImmediateHandler) and self._link.has_room:
            self._answer_now(call, found, event.payload)
            return
        self._calls[stream_id] = call
        self._in_flight_bytes += call.payload_bytes
        if deadline is not None and self._limits.answers_at_deadline:
            call.timer = self._loop.call_at(deadline, self._expire, call)
        call.task = self._spawn(self._run(call, found, event.payload), f"ttrpc/{event.method}/{stream_id}")
        # A callback, not a `finally` in the task: a task cancelled before its first step runs no line of its body.
        call.task.add_done_callback(lambda _: self._finish(call))

    def _find(self, event: RequestReceived) -> _Found | TtrpcError:
        """The handler of a request, or why it is not accepted."""
        methods = self._services.get(event.service)
        if methods is None:
            return TtrpcError(Code.UNIMPLEMENTED, f"service {_quote(event.service)}: not served here")
        handler = methods.get(event.method)
        if handler is None:
            name = _quote(f"{event.service}/{event.method}")
            return TtrpcError(Code.UNIMPLEMENTED, f"method {name}: not implemented")
        if self._is_draining():
            return TtrpcError(Code.UNAVAILABLE, "server is shutting down")
        limits = self._limits
        if len(self._calls) >= limits.in_flight:
            return TtrpcError(Code.RESOURCE_EXHAUSTED, f"{limits.in_flight} calls of this connection are in flight")
        if self._calls and self._in_flight_bytes + len(event.payload) > limits.in_flight_bytes:
            return TtrpcError(Code.RESOURCE_EXHAUSTED, f"{limits.in_flight_bytes} request bytes are in flight")
        return UnaryHandler(handler) if callable(handler) else handler

    def _on_refused(self, event: RequestRefused) -> None:
        self._log.debug("frame refused", extra={"stream": event.stream_id, "error": event.message})
        self._link.write(event.reply)

    def _answer_now(self, call: _Call, handler: ImmediateHandler, payload: bytes) -> None:
        try:
            frame = self._reply(call, handler.function(payload, call.context))
            if frame is not None:
                self._link.write(frame)
        except Exception as exc:
            self._on_exception(call, exc)

    async def _run(self, call: _Call, handler: _Found, payload: bytes) -> None:
        try:
            if isinstance(handler, ImmediateHandler):
                await self._link.send(lambda: self._reply(call, handler.function(payload, call.context)))
            else:
                result = await handler.function(payload, call.context)
                await self._link.send(lambda: self._reply(call, result))
        except Exception as exc:
            self._on_exception(call, exc)

    def _reply(self, call: _Call, result: Buffer) -> bytes | None:
        stream_id = call.stream_id
        if not self._core.is_open(stream_id):
            self._log.debug("late reply dropped", extra={"method": call.name, "stream": stream_id})
            return None
        if not isinstance(result, bytes | bytearray | memoryview):
            raise TypeError(f"method '{call.name}' returned {type(result).__name__}, expected bytes")
        return self._core.response(stream_id, result)

    def _on_exception(self, call: _Call, exc: Exception) -> None:
        code = getattr(exc, "code", None)
        fields = {"method": call.name, "stream": call.stream_id, "error": f"{type(exc).__name__}: {exc}"}
        if isinstance(exc, ConnectionClosed) and self._link.is_closed:
            self._log.debug("reply lost", extra=fields)
        elif isinstance(code, int) and not isinstance(code, bool) and Code.OK < code <= Code.UNAUTHENTICATED:
            self._log.debug("call failed", extra=fields)
            self._answer(call.stream_id, code, str(exc))
        else:
            self._log.error("call raised", exc_info=exc, extra=fields)
            self._answer(call.stream_id, Code.INTERNAL, f"{type(exc).__name__}: {exc}")

    def _answer(self, stream_id: int, code: int, message: str) -> None:
        """Ends the stream with a status unless it is over. Not delayed by a full queue: a status is small."""
        if self._core.is_open(stream_id) and not self._link.is_closed:
            self._link.write(self._core.error(stream_id, code, message))

    def _expire(self, call: _Call) -> None:
        error = CallTimedOut(f"call '{call.name}': deadline exceeded")
        self._answer(call.stream_id, error.code, error.message)
        self._cancel_if_allowed(call)

    def _on_closed(self, error: Exception | None) -> None:
        level = logging.DEBUG if error is None or isinstance(error, ConnectionError) else logging.WARNING
        self._log.log(level, "connection closed", extra={"in_flight": len(self._calls), "error": str(error or "")})
        for call in tuple(self._calls.values()):
            self._cancel_if_allowed(call)
        self._on_session_closed(self)

    def _cancel_if_allowed(self, call: _Call) -> None:
        if call.handler.cancel_on_timeout and call.task is not None:
            call.task.cancel()

    def _finish(self, call: _Call) -> None:
        self._answer(call.stream_id, Code.CANCELLED, f"call '{call.name}': handler was cancelled")
        if call.timer is not None:
            call.timer.cancel()
        del self._calls[call.stream_id]
        self._in_flight_bytes -= call.payload_bytes


def _quote(name: str) -> str:
    return repr(name if len(name) <= _QUOTED_CHARS else name[:_QUOTED_CHARS] + "...")
