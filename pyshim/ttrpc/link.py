"""A protocol core on a stream socket: one reader, one bounded outgoing queue, one writer. asyncio.

It receives large payloads straight into the core's buffer and sends queued frames together with `sendmsg`. It does not
half-close: the end of one direction is the end of the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from .connection import ClientConnection, Event, ServerConnection
from .framing import Buffer
from .status import ConnectionClosed

QUEUE_BYTES = 1 << 20
"""Bytes of the outgoing queue from which on `send` waits."""
_READS_PER_TURN = 16
"""Reads before other work of the loop has its turn."""
_BUFFERS_PER_SEND = 64
"""Buffers of one `sendmsg`; the kernel takes up to 1024."""


class ByteStream(Protocol):
    """The methods of a connected stream socket that a `Link` uses, with a socket's behaviour and exceptions."""

    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def send(self, data: Buffer, /) -> int: ...
    def sendmsg(self, buffers: Iterable[Buffer], /) -> int: ...
    def close(self) -> None: ...


class Link:
    """Owns a connected stream socket (unix, vsock, TCP), or a stream like one, and closes it.

    `on_events` and `on_closed` are called synchronously; `on_closed` once.
    """

    def __init__(
        self,
        core: ServerConnection | ClientConnection,
        sock: ByteStream,
        *,
        on_events: Callable[[list[Event]], None],
        on_closed: Callable[[Exception | None], None],
        queue_bytes: int = QUEUE_BYTES,
        hold_when_full: bool = False,
    ) -> None:
        """`hold_when_full` stops reading while the outgoing queue is full: for servers, whose input makes output."""
        self._core = core
        self._on_events = on_events
        self._on_closed = on_closed
        self._queue_bytes = queue_bytes
        self._hold_when_full = hold_when_full
        self._loop = asyncio.get_running_loop()
        self._held = False
        self._gate = asyncio.Lock()
        self._drained: asyncio.Future[None] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.error: Exception | None = None
        """The reason why the link closed; None when the peer or this side ended it."""
        sock.setblocking(False)
        self._sock = sock
        self._queue: deque[Buffer] = deque()
        self.queued_bytes = 0
        self._accepted_bytes = 0
        self._writing = False
        self._gathering = False
        self._broken = False
        self._flushed: list[asyncio.Future[None]] = []

    @property
    def is_closed(self) -> bool:
        return self.closed.done()

    @property
    def has_room(self) -> bool:
        """True when `send` would not wait."""
        return self.queued_bytes <= self._queue_bytes and not self._gate.locked()

    def start(self) -> None:
        """Reading begins."""
        if not self._held and not self.is_closed:
            self._resume()

    def write(self, frame: bytes) -> int:
        """Queue one whole frame, even when the queue is full. The result is a mark for `was_sent`."""
        self.queued_bytes += len(frame)
        self._accepted_bytes += len(frame)
        mark = self._accepted_bytes
        if self.is_closed or self._broken:
            return mark
        self._queue.append(frame)
        if not self._writing and not self._gathering:
            self._flush_queue()
        if self._hold_when_full and self.queued_bytes > self._queue_bytes:
            self._hold_reading()
        return mark

    def was_sent(self, mark: int) -> bool:
        """True when the peer may have received the whole frame of this mark."""
        return mark <= self._accepted_bytes - self.queued_bytes

    async def flush(self) -> None:
        """Everything queued has been handed to the kernel, or the link is closed."""
        if self._queue and not self.is_closed:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._flushed.append(waiter)
            await waiter

    async def send(self, make: Callable[[], bytes | None]) -> int:
        """Call `make` once the queue has room and queue its frame, in one synchronous stretch. Raises ConnectionClosed.

        `make` is called as late as possible: the stream id it takes, and its decision whether an answer is still
        wanted, are then true when the frame is queued. None means that nothing is to be sent any more.
        """
        if self.has_room:
            return self._send_now(make)
        async with self._gate:
            while self.queued_bytes > self._queue_bytes and not self.is_closed:
                await self._wait_drained()
            return self._send_now(make)

    def close(self, error: Exception | None = None) -> None:
        """The stream is closed at once; queued frames are dropped. Idempotent."""
        if self.is_closed:
            return
        self.error = error
        self.closed.set_result(None)
        self._wake_drained()
        self._shut()
        self._on_closed(error)

    def _send_now(self, make: Callable[[], bytes | None]) -> int:
        if self.is_closed:
            raise ConnectionClosed("send: connection is closed")
        frame = make()
        return 0 if frame is None else self.write(frame)

    async def _wait_drained(self) -> None:
        # Only the holder of the gate waits here, so one future is enough.
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    def _wake_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _flush_queue(self) -> None:
        try:
            while self._queue:
                self._sent(self._send_some())
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush_queue)
        except OSError as exc:
            self._broken = True
            self._loop.remove_writer(self._sock)
            self._loop.call_soon(self._close_broken, exc)
        else:
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock)
            self._wake_flushed()

    def _send_some(self) -> int:
        if len(self._queue) == 1:
            return self._sock.send(self._queue[0])
        buffers = [self._queue[index] for index in range(min(len(self._queue), _BUFFERS_PER_SEND))]
        return self._sock.sendmsg(buffers)

    def _sent(self, count: int) -> None:
        self.queued_bytes -= count
        while count:
            first = self._queue[0]
            if count < len(first):
                self._queue[0] = memoryview(first)[count:]
                break
            count -= len(first)
            self._queue.popleft()
        if self.queued_bytes <= self._queue_bytes:
            self._wake_drained()
            self._release_reading()

    def _close_broken(self, error: OSError) -> None:
        # Replies that the peer sent before it closed are still in the receive buffer: their outcome is known.
        while not self.is_closed and self._read_once():
            pass
        self.close(error)

    def _on_readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._held or self.is_closed or not self._read_once():
                return

    def _read_once(self) -> bool:
        """True when there may be more to read right now."""
        buffer = self._core.receive_buffer()
        size = len(buffer)
        try:
            count = self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self.close(exc)
            return False
        if not count:
            self.close(self._core.receive_eof())
            return False
        # Immediate answers are sent together, so that the peer is woken once.
        self._gathering = True
        try:
            if events := self._core.received(count):
                self._on_events(events)
            if flood := self._core.flood:
                self.close(flood)
                return False
        except BaseException as exc:
            # A bug on this side. The state of the stream is unknown; the loop's exception handler reports the error.
            self.close(exc if isinstance(exc, Exception) else None)
            raise
        finally:
            self._gathering = False
        if self._queue and not self._writing and not self._broken:
            self._flush_queue()
        return count == size

    def _hold_reading(self) -> None:
        """Nothing is read until the queue has room again."""
        if not self._held and not self.is_closed:
            self._held = True
            self._loop.remove_reader(self._sock)

    def _release_reading(self) -> None:
        if self._held:
            self._held = False
            if not self.is_closed:
                self._resume()

    def _resume(self) -> None:
        try:
            self._loop.add_reader(self._sock, self._on_readable)
        except OSError as error:  # such as ENOSPC: the user has too many watches
            self.close(error)

    def _shut(self) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._queue.clear()
        self._wake_flushed()

    def _wake_flushed(self) -> None:
        for waiter in self._flushed:
            if not waiter.done():
                waiter.set_result(None)
        self._flushed.clear()
