"""Received messages of one stream that nobody has read yet, and the rule for readers that do not keep up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .link import Link

INBOX_MESSAGES = 64
INBOX_BYTES = 4 << 20
STALL_GRACE_S = 1.0


class Inbox:
    """A queue with an end. Several tasks may not read at once."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        return len(self._messages) >= INBOX_MESSAGES or self._bytes >= INBOX_BYTES

    def put(self, message: bytes) -> None:
        """Queue a message; dropped after the end."""
        if self._ended:
            return
        self._messages.append(message)
        self._bytes += len(message)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No message follows. With an error, readers get it after the queued messages. The first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def discard(self) -> None:
        """Drop what is queued."""
        self._messages.clear()
        self._bytes = 0

    async def get(self) -> bytes | None:
        """The next message; None at the end. Raises the error the stream ended with."""
        while not self._messages:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            if self._waiter is not None:
                raise RuntimeError("receive from stream: another task is receiving already")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        was_full = self.full
        message = self._messages.popleft()
        self._bytes -= len(message)
        if was_full and not self.full:
            self._on_room()
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StallGuard:
    """Holds a connection's reading while an inbox is full, and gives up on a stream that stays full.

    ttrpc has no flow control, so a stream nobody reads would either grow without limit or block its whole connection.
    The rule is the one of the Go implementation: 64 messages (here also 4 MiB), then one second in which the
    connection waits, then the stream fails.
    """

    def __init__(self, link: Link, on_stall: Callable[[int], None], grace_s: float) -> None:
        self._link = link
        self._on_stall = on_stall
        self._grace_s = grace_s
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def check(self, stream_id: int, inbox: Inbox) -> None:
        """To be called after a `put`."""
        if inbox.full and stream_id not in self._timers:
            self._link.hold_reading(stream_id)
            loop = asyncio.get_running_loop()
            self._timers[stream_id] = loop.call_later(self._grace_s, self._expire, stream_id)

    def release(self, stream_id: int) -> None:
        """The inbox has room again, or the stream is over."""
        timer = self._timers.pop(stream_id, None)
        if timer is not None:
            timer.cancel()
            self._link.release_reading(stream_id)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _expire(self, stream_id: int) -> None:
        self._on_stall(stream_id)
        self.release(stream_id)
