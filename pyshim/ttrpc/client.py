"""The asyncio client: many concurrent calls on one connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from types import TracebackType

from .connection import ClientConnection, Event, ResponseReceived, StreamFailed
from .framing import MAX_MESSAGE_BYTES, Buffer
from .link import QUEUE_BYTES, Link
from .status import (
    CallTimedOut,
    ConnectionClosed,
    OutcomeUnknown,
    RemoteError,
    TtrpcError,
)

CROWDED_PAUSE_S = 0.05
"""Seconds before the next attempt when the listen queue is full."""
_MAX_TIMEOUT_S = 9e9
"""Seconds whose nanoseconds still fit into an int64."""


class Client:
    """One connection to a ttrpc server, on a connected stream socket that it owns; ended by `close`.

    Made in a running loop.
    """

    def __init__(
        self, sock: socket.socket, *, max_message_bytes: int = MAX_MESSAGE_BYTES, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        self._core = ClientConnection(max_message_bytes=max_message_bytes)
        self._link = Link(
            self._core, sock, on_events=self._on_events, on_closed=self._on_closed, queue_bytes=queue_bytes
        )
        self._calls: dict[int, _PendingCall] = {}
        self._link.start()

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    @property
    def close_error(self) -> Exception | None:
        """The reason why the connection dropped; None while it lives and after a plain end."""
        return self._link.error

    async def call(
        self,
        service: str,
        method: str,
        payload: Buffer,
        *,
        timeout_s: float | None,
        late_s: float = 0.0,
        metadata: Iterable[tuple[str, str]] = (),
        max_reply_bytes: int | None = None,
    ) -> bytes:
        """The reply of a unary call, of `max_reply_bytes` at most, envelope included.

        Raises RemoteError for a status of the server; CallTimedOut when `timeout_s` passed and `late_s` after it
        (the server gets the deadline and may still work); OutcomeUnknown when the connection dropped between request
        and reply; ConnectionClosed when it dropped before the request was sent; MessageTooLarge; RemoteProtocolError.
        A call that ends early, by timeout or cancellation, leaves nothing behind: its late reply is dropped.
        """
        pending = _PendingCall(asyncio.get_running_loop().create_future())

        def make() -> bytes:
            stream_id, frame = self._core.request(
                service,
                method,
                payload,
                timeout_ns=_nanoseconds(timeout_s),
                metadata=metadata,
                max_reply_bytes=max_reply_bytes,
            )
            pending.stream_id = stream_id
            self._calls[stream_id] = pending
            return frame

        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + late_s):
                pending.mark = await self._link.send(make)
                reply = await pending.reply
        except ConnectionClosed as exc:
            raise ConnectionClosed(f"call '{service}/{method}': {self._closed_text()}") from exc
        except TimeoutError as exc:
            raise CallTimedOut(f"call '{service}/{method}': no reply within {timeout_s} s") from exc
        finally:
            self._calls.pop(pending.stream_id, None)
            self._core.forget(pending.stream_id)
        if isinstance(reply, TtrpcError):
            raise reply
        return reply

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

    def _closed_text(self) -> str:
        error = self._link.error
        return "connection is closed" if error is None else f"connection is closed: {error}"

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            pending = self._calls.get(event.stream_id)
            if pending is not None:
                _resolve(pending.reply, event)

    def _on_closed(self, error: Exception | None) -> None:
        for pending in self._calls.values():
            if not pending.reply.done():
                pending.reply.set_result(self._lost(pending.mark))

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


def _resolve(reply: asyncio.Future[bytes | TtrpcError], event: Event) -> None:
    # Failures travel as results: an exception set on a future whose call was just cancelled would be reported as lost.
    if reply.done():
        return
    if isinstance(event, ResponseReceived):
        failed = RemoteError(event.code, event.message) if event.code else None
        reply.set_result(event.payload if failed is None else failed)
    elif isinstance(event, StreamFailed):
        reply.set_result(event.error)


def _nanoseconds(timeout_s: float | None) -> int:
    """The timeout on the wire. 0 means none, so an expired one is sent as 1, and one beyond int64 as 0."""
    if timeout_s is None or timeout_s >= _MAX_TIMEOUT_S:
        return 0
    return max(1, int(timeout_s * 1e9))


async def connected_unix_socket(path: str) -> socket.socket:
    """A connected, non-blocking stream socket, once the listener at `path` has room for one more. Raises OSError.

    asyncio's `sock_connect` does not do: the kernel answers EAGAIN when the listen queue is full, asyncio then waits
    until the socket is writable, which an unconnected one is, and reports success. The kernel has no event for room in
    the queue, so this polls; the caller limits the wait.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(CROWDED_PAUSE_S)
    except BaseException:
        sock.close()
        raise
