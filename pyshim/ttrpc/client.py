"""The asyncio client: many concurrent calls and streams on one connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from .connection import ClientConnection
from .events import DataReceived, Event, ResponseReceived, StreamFailed
from .framing import FLAG_REMOTE_CLOSED, FLAG_REMOTE_OPEN, MAX_MESSAGE_BYTES
from .inbox import STALL_GRACE_S, Inbox, StallGuard
from .link import QUEUE_BYTES, Link, SocketLink, StreamLink
from .status import (
    Code,
    ConnectionClosed,
    DeadlineExceeded,
    LocalProtocolError,
    OutcomeUnknown,
    RemoteError,
    RemoteProtocolError,
    TtrpcError,
)

if TYPE_CHECKING:
    from .connection import Parts
    from .framing import Buffer

_Result = TypeVar("_Result")
_MAX_TIMEOUT_S = 9e9


class Client:
    """One connection to a ttrpc server. Made by `connect_socket` or `from_streams`, ended by `close`."""

    def __init__(
        self,
        make_link: Callable[[Client, ClientConnection], Link],
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        stall_grace_s: float = STALL_GRACE_S,
    ) -> None:
        self._core = ClientConnection(max_message_bytes=max_message_bytes)
        self._link = make_link(self, self._core)
        self._stalls = StallGuard(self._link, self._on_stall, stall_grace_s)
        self._calls: dict[int, _PendingCall] = {}
        self._streams: dict[int, ClientStream] = {}
        self._link.start()

    @classmethod
    async def connect_socket(
        cls,
        sock: socket.socket,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        queue_bytes: int = QUEUE_BYTES,
        stall_grace_s: float = STALL_GRACE_S,
    ) -> Client:
        """A client on a connected stream socket, which it owns from now on.

        A stream whose user leaves a full inbox (64 messages or 4 MiB) unread for `stall_grace_s` fails.
        """
        return cls(
            lambda client, core: SocketLink(
                core, sock, on_events=client._on_events, on_closed=client._on_closed, queue_bytes=queue_bytes
            ),
            max_message_bytes=max_message_bytes,
            stall_grace_s=stall_grace_s,
        )

    @classmethod
    async def from_streams(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        queue_bytes: int = QUEUE_BYTES,
        stall_grace_s: float = STALL_GRACE_S,
    ) -> Client:
        """A client on an asyncio stream pair, which it owns from now on."""
        return cls(
            lambda client, core: StreamLink(
                core, reader, writer, on_events=client._on_events, on_closed=client._on_closed, queue_bytes=queue_bytes
            ),
            max_message_bytes=max_message_bytes,
            stall_grace_s=stall_grace_s,
        )

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    @property
    def close_error(self) -> Exception | None:
        """Why the connection dropped; None while it lives and after a plain end."""
        return self._link.error

    @property
    def ignored_frames(self) -> int:
        """Frames of the server that made no sense: unknown streams and types. More than none means a broken peer."""
        return self._core.ignored_frames - self._core.late_frames

    @property
    def late_frames(self) -> int:
        """Frames that came after their call had timed out or been cancelled."""
        return self._core.late_frames

    async def call(
        self,
        service: str,
        method: str,
        payload: Buffer,
        *,
        timeout_s: float | None,
        late_s: float = 0.0,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> bytes:
        """The reply of a unary call.

        Raises RemoteError for a status of the server; DeadlineExceeded when `timeout_s` passed and `late_s` after it
        (the server is told the former and may still work); OutcomeUnknown when the connection dropped between request
        and reply; ConnectionClosed when it dropped before the request was sent; MessageTooLarge; RemoteProtocolError.
        A call that ends early, by timeout or cancellation, leaves nothing behind: its late reply is dropped.
        """
        pending = _PendingCall(asyncio.get_running_loop().create_future())

        def make() -> Parts:
            stream_id, parts = self._core.request_parts(
                service, method, payload, timeout_ns=_nanoseconds(timeout_s), metadata=metadata
            )
            pending.stream_id = stream_id
            self._calls[stream_id] = pending
            return parts

        try:
            if timeout_s is None:
                reply = await self._answered(pending, make, service, method)
            else:
                async with asyncio.timeout(timeout_s + late_s):
                    reply = await self._answered(pending, make, service, method)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"call '{service}/{method}': no reply within {timeout_s} s") from exc
        finally:
            self._calls.pop(pending.stream_id, None)
            self._core.forget(pending.stream_id)
        if isinstance(reply, TtrpcError):
            raise reply
        return reply

    async def _answered(
        self, pending: _PendingCall, make: Callable[[], Parts], service: str, method: str
    ) -> bytes | TtrpcError:
        pending.mark = await self._send(make, f"call '{service}/{method}'")
        return await pending.reply

    def stream(
        self,
        service: str,
        method: str,
        payload: Buffer | None = None,
        *,
        client_streams: bool,
        server_streams: bool,
        timeout_s: float | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> ClientStream:
        """A stream, opened when entered with `async with` and forgotten when left.

        `payload` is the request message when the client does not stream; else an optional first message.
        """
        if payload is None and not client_streams:
            raise LocalProtocolError(f"stream '{service}/{method}': a client that does not stream sends one request")
        return ClientStream(self, service, method, payload, client_streams, server_streams, timeout_s, tuple(metadata))

    async def closed(self) -> None:
        """The connection is closed, by either side."""
        await asyncio.shield(self._link.closed)

    def close(self) -> None:
        """The connection is closed; calls in progress fail. Idempotent."""
        self._link.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _send(self, make: Callable[[], Parts | None], action: str) -> int:
        try:
            return await self._link.send(make)
        except ConnectionClosed as exc:
            raise ConnectionClosed(f"{action}: {self._closed_text()}") from exc

    def _closed_text(self) -> str:
        error = self._link.error
        return "connection is closed" if error is None else f"connection is closed: {error}"

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            stream_id = event.stream_id
            pending = self._calls.get(stream_id)
            if pending is not None:
                _resolve(pending.reply, event)
                continue
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream._on_event(event)
                if isinstance(event, DataReceived) and not event.closed:
                    self._stalls.check(stream_id, stream._inbox)

    def _on_stall(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._core.forget(stream_id)
            stream._inbox.discard()
            message = f"stream '{stream._name}': its messages are not read in time"
            stream._inbox.end(TtrpcError(Code.RESOURCE_EXHAUSTED, message))

    def _on_closed(self, error: Exception | None) -> None:
        self._stalls.close()
        for pending in self._calls.values():
            if not pending.reply.done():
                pending.reply.set_result(self._lost(pending.mark))
        for stream in self._streams.values():
            stream._inbox.end(self._lost(stream._mark))

    def _lost(self, mark: int | None) -> ConnectionClosed:
        if mark is not None and not self._link.was_sent(mark):
            return ConnectionClosed(f"request was not sent: {self._closed_text()}")
        return OutcomeUnknown(f"reply is lost: {self._closed_text()}")


class _PendingCall:
    """A unary call. `mark` is set once its request was queued."""

    __slots__ = ("mark", "reply", "stream_id")

    def __init__(self, reply: asyncio.Future[bytes | TtrpcError]) -> None:
        self.reply = reply
        self.stream_id = 0
        self.mark: int | None = None


class ClientStream:
    """The client's end of one stream. Enter with `async with`; iterating yields the server's messages to their end."""

    def __init__(
        self,
        client: Client,
        service: str,
        method: str,
        payload: Buffer | None,
        client_streams: bool,
        server_streams: bool,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._client = client
        self._service = service
        self._method = method
        self._payload = payload
        self._flags = FLAG_REMOTE_OPEN if client_streams else FLAG_REMOTE_CLOSED
        self._server_streams = server_streams
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._deadline: float | None = None
        self._stream_id = 0
        self._mark: int | None = None
        self._inbox = Inbox(self._on_room)

    @property
    def _name(self) -> str:
        return f"{self._service}/{self._method}"

    async def __aenter__(self) -> ClientStream:
        if self._timeout_s is not None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        self._mark = await self._timed(self._client._send(self._open, f"open stream '{self._name}'"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        self._inbox.discard()
        self._inbox.end(LocalProtocolError(f"stream '{self._name}': left already"))

    async def send(self, message: Buffer) -> None:
        """The message is queued; waits while the connection's outgoing queue is full.

        Raises LocalProtocolError when the stream is over or this side was closed: `recv` then tells the server's word.
        """
        await self._timed(self._client._send(lambda: self._data(message, False), f"send on stream '{self._name}'"))

    async def close_send(self) -> None:
        """The server is told that no more messages come. Does nothing when the stream is over."""
        if self._client._core.can_send(self._stream_id):
            await self._timed(self._client._send(lambda: self._data(None, True), f"close stream '{self._name}'"))

    async def recv(self) -> bytes | None:
        """The server's next message; None at the end. A server that does not stream sends exactly one.

        Raises as `Client.call` does.
        """
        return await self._timed(self._inbox.get())

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> bytes:
        message = await self.recv()
        if message is None:
            raise StopAsyncIteration
        return message

    async def _timed(self, awaitable: Awaitable[_Result]) -> _Result:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await awaitable
        except TimeoutError as exc:
            self._forget()
            raise DeadlineExceeded(f"stream '{self._name}': deadline of {self._timeout_s} s exceeded") from exc

    def _open(self) -> Parts:
        self._stream_id, parts = self._client._core.request_parts(
            self._service,
            self._method,
            self._payload or b"",
            timeout_ns=_nanoseconds(self._timeout_s),
            metadata=self._metadata,
            flags=self._flags,
        )
        self._payload = None
        self._client._streams[self._stream_id] = self
        return parts

    def _data(self, message: Buffer | None, close: bool) -> Parts | None:
        if close and not self._client._core.can_send(self._stream_id):
            return None
        return self._client._core.data_parts(self._stream_id, message, close=close)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._on_data(event)
        elif isinstance(event, ResponseReceived):
            if event.code:
                self._inbox.end(RemoteError(event.code, event.message, event.details))
            else:
                # On a stream of messages a plain response is no message of its own unless it carries something.
                if event.payload or not self._server_streams:
                    self._inbox.put(event.payload)
                self._inbox.end()
            self._client._streams.pop(self._stream_id, None)
        elif isinstance(event, StreamFailed):
            self._inbox.end(event.error)
            self._client._streams.pop(self._stream_id, None)

    def _on_data(self, event: DataReceived) -> None:
        if not self._server_streams:
            self._forget()
            self._inbox.end(RemoteProtocolError(f"stream '{self._name}': data frame instead of a response"))
            return
        if event.payload is not None:
            self._inbox.put(event.payload)
        if event.closed:
            self._inbox.end()
            self._client._streams.pop(self._stream_id, None)

    def _on_room(self) -> None:
        self._client._stalls.release(self._stream_id)

    def _forget(self) -> None:
        self._client._streams.pop(self._stream_id, None)
        self._client._core.forget(self._stream_id)
        self._client._stalls.release(self._stream_id)


def _resolve(reply: asyncio.Future[bytes | TtrpcError], event: Event) -> None:
    # Failures travel as results: an exception set on a future whose call was just cancelled would be reported as lost.
    if reply.done():
        return
    if isinstance(event, ResponseReceived):
        failed = RemoteError(event.code, event.message, event.details) if event.code else None
        reply.set_result(event.payload if failed is None else failed)
    elif isinstance(event, StreamFailed):
        reply.set_result(event.error)


def _nanoseconds(timeout_s: float | None) -> int:
    """The wire's timeout. 0 means none, so an expired one is sent as 1; one beyond int64 is as good as none."""
    if timeout_s is None or timeout_s >= _MAX_TIMEOUT_S:
        return 0
    return max(1, int(timeout_s * 1e9))
