"""One byte stream that speaks ttrpc: received bytes become running calls, finished calls become frames.

The fd is watched edge-triggered, so every handler reads or writes until the kernel says EAGAIN. That also makes a
virtio-serial port bearable: while no host is connected it reports a hang-up, which level-triggered epoll would repeat
for ever.
"""

from __future__ import annotations

import os
import select

from pyshim.ttrpc.connection import ServerConnection
from pyshim.ttrpc.events import RequestReceived, RequestRefused

from guest.agent import log
from guest.agent.runtime.loop import Cancelled
from guest.agent.service import CallFailed, call, only_waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.agent.agent import Agent
    from guest.agent.runtime.loop import Loop, Task

_READS_PER_TURN = 32
_MAX_QUEUED_BYTES = 8 << 20
_WRITE_PARTS = 64
_DEADLINE_EXCEEDED = 4
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Peer:
    """A connected byte stream. Owns `fd`; `on_end` runs once when it is closed.

    `keep_open` is for a serial port: end of file means that the host went away; the next bytes are a new host's first.
    """

    def __init__(self, loop: Loop, agent: Agent, fd: int, *, keep_open: bool, on_end: Callable[[Peer], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._agent = agent
        self._fd = fd
        self._keep_open = keep_open
        self._on_end = on_end
        self._connection = ServerConnection()
        self._calls: dict[int, tuple[Task, bool]] = {}
        self._queue: list[memoryview] = []
        self._queued_bytes = 0
        self._reading_later = False
        self._used = False
        self.closed = False

    def start(self) -> None:
        """Requests are served from now on."""
        self._loop.watch(self._fd, _EVENTS, self._on_events)
        self._receive()

    def is_drained(self) -> bool:
        """Whether no work is under way and everything said so far has been handed to the kernel."""
        return self.closed or not (self._queue or any(not gives_up for _task, gives_up in self._calls.values()))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._fd)
        os.close(self._fd)
        self._forget_calls()
        self._on_end(self)

    # -- receiving -------------------------------------------------------------------------------------------------

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT:
            self._receive()

    def _receive_later(self) -> None:
        if not self._reading_later:
            self._reading_later = True
            self._loop.soon(self._receive_now)

    def _receive_now(self) -> None:
        self._reading_later = False
        self._receive()

    def _receive(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self.closed or self._queued_bytes > _MAX_QUEUED_BYTES:
                return  # `_flush` reads on once the peer has taken its replies
            try:
                count = os.readv(self._fd, [self._connection.receive_buffer()])
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("connection broke", error=error)
                count = 0
            if count == 0:
                self._ended()
                return
            self._used = True
            for event in self._connection.received(count):
                if isinstance(event, RequestReceived):
                    self._start_call(event)
                elif isinstance(event, RequestRefused):
                    if event.ended:
                        self._forget_call(event.stream_id)
                    self._send((event.reply,))
        self._receive_later()

    def _ended(self) -> None:
        if not self._keep_open:
            self.close()
        elif self._used:
            log.info("host disconnected, waiting for the next one")
            self._used = False
            self._forget_calls()
            self._connection = ServerConnection()
            self._queue.clear()
            self._queued_bytes = 0

    # -- calls -----------------------------------------------------------------------------------------------------

    def _start_call(self, event: RequestReceived) -> None:
        log.debug("-->", stream=event.stream_id, method=event.method, bytes=len(event.payload))
        gives_up = only_waits(event.service, event.method)
        stream_id, connection = event.stream_id, self._connection
        task = self._loop.spawn(event.method, call(self._agent, event.service, event.method, event.payload))
        self._calls[stream_id] = (task, gives_up)
        timer = None
        if gives_up and event.timeout_ns > 0:
            timer = self._loop.call_later(event.timeout_ns / 1e9, task.cancel)

        def finished() -> None:
            if timer is not None:
                timer.cancel()
            if self.closed or connection is not self._connection:
                return
            self._calls.pop(stream_id, None)
            self._reply(stream_id, task)

        task.result.when_done(finished)

    def _reply(self, stream_id: int, task: Task) -> None:
        connection = self._connection
        if not connection.is_open(stream_id):
            return
        error = task.result.error
        if error is None:
            log.debug("<--", stream=stream_id, method=task.name, bytes=len(task.result.value))
            try:
                self._send(connection.response_parts(stream_id, task.result.value))
                return
            except Exception as too_large:
                error = CallFailed(8, f"{task.name}: {too_large}")
        if isinstance(error, CallFailed):
            code, message = error.code, error.message
        elif isinstance(error, Cancelled):
            code, message = _DEADLINE_EXCEEDED, f"{task.name}: deadline exceeded"
        else:
            code, message = 13, f"{task.name}: {error!r}"
        self._send((connection.send_error(stream_id, code, message[:65536]),))

    def _forget_call(self, stream_id: int) -> None:
        task, gives_up = self._calls.pop(stream_id, (None, False))
        if task is not None and gives_up:
            task.cancel()

    def _forget_calls(self) -> None:
        # What only waits is given up, so that it takes no bytes from a later reader; work that was asked for
        # is finished.
        for stream_id in list(self._calls):
            self._forget_call(stream_id)

    # -- sending ---------------------------------------------------------------------------------------------------

    def _send(self, parts: tuple[bytes | bytearray | memoryview, ...]) -> None:
        for part in parts:
            self._queue.append(memoryview(part))
            self._queued_bytes += len(part)
        self._flush()

    def _flush(self) -> None:
        was_full = self._queued_bytes > _MAX_QUEUED_BYTES
        while self._queue and not self.closed:
            try:
                count = os.writev(self._fd, self._queue[:_WRITE_PARTS])
            except BlockingIOError:
                break
            except OSError as error:
                log.warning("connection broke", error=error)
                self._loop.soon(self._ended)
                return
            self._queued_bytes -= count
            done = 0
            while done < len(self._queue) and count >= len(self._queue[done]):
                count -= len(self._queue[done])
                done += 1
            del self._queue[:done]
            if count:
                self._queue[0] = self._queue[0][count:]
        if was_full and self._queued_bytes <= _MAX_QUEUED_BYTES:
            self._receive_later()
