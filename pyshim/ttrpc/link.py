"""A protocol core on a byte stream: one reader, one bounded outgoing queue, one writer. asyncio.

`SocketLink` drives a stream socket itself: it receives large payloads straight into the core's buffer and sends queued
buffers with `sendmsg`, so that a payload is not copied on its way. `StreamLink` does the same job on an asyncio reader
and writer, for byte streams that are not a socket of ours. Neither half-closes: the end of one direction is the end of
the connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .connection import ClientConnection, ServerConnection
from .events import Event
from .status import ConnectionClosed

if TYPE_CHECKING:
    from .connection import Parts
    from .framing import Buffer

QUEUE_BYTES = 1 << 20
_JOIN_BYTES = 16 << 10
_READ_BYTES = 64 << 10
_READS_PER_TURN = 16
_BUFFERS_PER_SEND = 64


class Link:
    """The part both kinds share. `on_events` and `on_closed` are called synchronously; `on_closed` once."""

    def __init__(
        self,
        core: ServerConnection | ClientConnection,
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
        self._holds: set[object] = set()
        self._gate = asyncio.Lock()
        self._drained: asyncio.Future[None] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.error: Exception | None = None
        """Why the link closed; None when the peer or this side simply ended it."""

    @property
    def is_closed(self) -> bool:
        return self.closed.done()

    @property
    def queued_bytes(self) -> int:
        raise NotImplementedError

    @property
    def has_room(self) -> bool:
        """Whether `send` would not wait."""
        return self.queued_bytes <= self._queue_bytes and not self._gate.locked()

    def start(self) -> None:
        """Reading begins."""
        raise NotImplementedError

    def write(self, parts: Parts) -> int:
        """Queue one whole frame, whatever the queue holds. The result is a mark for `was_sent`."""
        raise NotImplementedError

    def was_sent(self, mark: int) -> bool:
        """Whether the peer may have received the whole frame of this mark."""
        raise NotImplementedError

    async def flush(self) -> None:
        """Everything queued has been handed to the kernel, or the link is closed."""
        raise NotImplementedError

    async def send(self, make: Callable[[], Parts | None]) -> int:
        """Call `make` once the queue has room and queue its frame, in one synchronous stretch. Raises ConnectionClosed.

        `make` is called late, so that what it decides (a stream id, whether an answer is still wanted) is true when
        its frame is queued. None means that there is nothing to send any more.
        """
        if self.has_room:
            return self._send_now(make)
        async with self._gate:
            while self.queued_bytes > self._queue_bytes and not self.is_closed:
                await self._wait_drained()
            return self._send_now(make)

    def hold_reading(self, reason: object) -> None:
        """Nothing is read while at least one reason holds it."""
        if not self._holds and not self.is_closed:
            self._pause()
        self._holds.add(reason)

    def release_reading(self, reason: object) -> None:
        if reason in self._holds:
            self._holds.remove(reason)
            if not self._holds and not self.is_closed:
                self._resume()

    def close(self, error: Exception | None = None) -> None:
        """The stream is closed at once; what is queued is dropped. Idempotent."""
        if self.is_closed:
            return
        self.error = error
        self.closed.set_result(None)
        self._wake_drained()
        self._shut()
        self._on_closed(error)

    def _send_now(self, make: Callable[[], Parts | None]) -> int:
        if self.is_closed:
            raise ConnectionClosed("send: connection is closed")
        parts = make()
        return 0 if parts is None else self.write(parts)

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

    def _dispatch(self, events: list[Event]) -> None:
        if events:
            self._on_events(events)

    def _pause(self) -> None:
        raise NotImplementedError

    def _resume(self) -> None:
        raise NotImplementedError

    def _shut(self) -> None:
        raise NotImplementedError


class SocketLink(Link):
    """A link that owns a connected stream socket (unix, vsock, TCP) and closes it."""

    def __init__(
        self,
        core: ServerConnection | ClientConnection,
        sock: socket.socket,
        *,
        on_events: Callable[[list[Event]], None],
        on_closed: Callable[[Exception | None], None],
        queue_bytes: int = QUEUE_BYTES,
        hold_when_full: bool = False,
    ) -> None:
        super().__init__(
            core, on_events=on_events, on_closed=on_closed, queue_bytes=queue_bytes, hold_when_full=hold_when_full
        )
        sock.setblocking(False)
        self._sock = sock
        self._queue: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._accepted_bytes = 0
        self._writing = False
        self._gathering = False
        self._broken = False
        self._flushed: list[asyncio.Future[None]] = []

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def start(self) -> None:
        if not self._holds and not self.is_closed:
            self._resume()

    def write(self, parts: Parts) -> int:
        size = sum(map(len, parts))
        if self.is_closed or self._broken:
            self._accepted_bytes += size
            self._queued_bytes += size
            return self._accepted_bytes
        if len(parts) > 1 and size <= _JOIN_BYTES:
            self._queue.append(b"".join(parts))
        else:
            self._queue.extend(parts)
        self._queued_bytes += size
        self._accepted_bytes += size
        mark = self._accepted_bytes
        if not self._writing and not self._gathering:
            self._flush_queue()
        if self._hold_when_full and self._queued_bytes > self._queue_bytes:
            self.hold_reading(self)
        return mark

    def was_sent(self, mark: int) -> bool:
        return mark <= self._accepted_bytes - self._queued_bytes

    async def flush(self) -> None:
        if self._queue and not self.is_closed:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._flushed.append(waiter)
            await waiter

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
        self._queued_bytes -= count
        while count:
            first = self._queue[0]
            if count < len(first):
                self._queue[0] = memoryview(first)[count:]
                break
            count -= len(first)
            self._queue.popleft()
        if self._queued_bytes <= self._queue_bytes:
            self._wake_drained()
            self.release_reading(self)

    def _close_broken(self, error: OSError) -> None:
        # What the peer sent before it closed still waits in the receive buffer: those replies are known outcomes.
        while not self.is_closed and self._read_once():
            pass
        self.close(error)

    def _on_readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._holds or self.is_closed or not self._read_once():
                return

    def _read_once(self) -> bool:
        """Whether there may be more to read right now."""
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
        # What is answered at once leaves together: the peer is woken once.
        self._gathering = True
        try:
            self._dispatch(self._core.received(count))
        except BaseException as exc:
            # A bug of ours. The stream cannot be trusted any more; the loop's exception handler reports it.
            self.close(exc if isinstance(exc, Exception) else None)
            raise
        finally:
            self._gathering = False
        if self._queue and not self._writing and not self._broken:
            self._flush_queue()
        return count == size

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable)

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


class StreamLink(Link):
    """A link that owns an asyncio reader and writer and closes the writer."""

    def __init__(
        self,
        core: ServerConnection | ClientConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_events: Callable[[list[Event]], None],
        on_closed: Callable[[Exception | None], None],
        queue_bytes: int = QUEUE_BYTES,
        hold_when_full: bool = False,
    ) -> None:
        super().__init__(
            core, on_events=on_events, on_closed=on_closed, queue_bytes=queue_bytes, hold_when_full=hold_when_full
        )
        self._reader = reader
        self._writer = writer
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None

    @property
    def queued_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def start(self) -> None:
        self._task = self._loop.create_task(self._read(), name="ttrpc/read")

    def write(self, parts: Parts) -> int:
        if self.is_closed:
            return 1
        self._writer.writelines(parts)
        if self.queued_bytes > self._queue_bytes and self._drain_task is None:
            if self._hold_when_full:
                self.hold_reading(self)
            self._drain_task = self._loop.create_task(self._drain(), name="ttrpc/drain")
        return 0

    def was_sent(self, mark: int) -> bool:
        # The transport does not tell how far it got.
        return mark == 0

    async def flush(self) -> None:
        # The limits decide when drain() returns; the default low mark is a quarter of 64 KiB, not zero.
        self._writer.transport.set_write_buffer_limits(high=0)
        try:
            await self._writer.drain()
        except OSError as exc:
            self.close(exc)

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as exc:
            self.close(exc)
        finally:
            self._drain_task = None
            self._wake_drained()
            self.release_reading(self)

    async def _read(self) -> None:
        try:
            while not self.is_closed:
                data = await self._reader.read(_READ_BYTES)
                await self._may_read.wait()
                if not data:
                    self.close(self._core.receive_eof())
                    return
                self._dispatch(self._core.receive_data(data))
        except OSError as exc:
            self.close(exc)
        finally:
            self.close()

    def _pause(self) -> None:
        self._may_read.clear()

    def _resume(self) -> None:
        self._may_read.set()

    def _shut(self) -> None:
        self._may_read.set()
        self._writer.transport.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
