"""Moves a process's bytes between the client's streams on the host and the agent's calls, at the slower one's pace.

A stream has one read in flight, never two: kata-agent serves the calls of a connection in parallel, so the replies of
two reads may come in either order. The next read runs while the data of the last one are written.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import Internal, ShimError
from pyshim.model.observation import mark
from pyshim.model.seams import OutputStream

log = logging.getLogger(__name__)

FIRST_READ_BYTES = 64 * 1024
"""Bytes of the first read: an agent allocates as many for every read that waits, and most streams are quiet."""
MAX_READ_BYTES = 1024 * 1024
WRITE_BYTES = 1024 * 1024
"""Bytes of the largest read and write: below ttrpc's limit of 4 MiB for a message, envelope included."""


class Progress:
    """Counts the bytes that move in a process's streams: a drain ends when none have moved for some time."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` gives seconds; it is asked whenever something moves."""
        self._clock = clock
        self._moved_at = clock()
        self.moves = 0
        self.blocked_writes = 0
        """Writes that wait for a slow reader now."""
        self.bytes_by_stream = Counter[str]()
        """Bytes that have reached their reader."""

    def move(self) -> None:
        """Bytes have moved."""
        self.moves += 1
        self._moved_at = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since bytes last moved."""
        return self._clock() - self._moved_at


async def pump_output(
    read: Callable[[int], Awaitable[bytes | memoryview]],
    stream: OutputStream | None,
    progress: Progress,
    name: str = "stdout",
) -> None:
    """The process's output has reached its end and all of it is with the client; `progress` counts it under `name`.

    Without a client, or when the client takes no more, output is read and dropped: a full disk or a dead log program
    must not stop the container.
    """
    takes = stream is not None
    size = FIRST_READ_BYTES
    ahead: asyncio.Task[bytes | memoryview] | None = None
    try:
        while data := await (read(size) if ahead is None else ahead):
            if not progress.moves:
                mark("first output")
            progress.move()
            ahead = None
            is_busy = len(data) >= FIRST_READ_BYTES
            size = next_read_bytes(size, len(data))
            if takes and stream is not None:
                if is_busy:
                    ahead = asyncio.ensure_future(read(size))
                    await asyncio.sleep(0)  # the request leaves before the write, which may wait
                takes = await _write(stream, data, progress)
                if takes:
                    progress.bytes_by_stream[name] += len(data)
        if takes and stream is not None:
            await stream.finish()
    finally:
        if ahead is not None and not ahead.done():
            await cancel_all(ahead)
        if stream is not None:  # also when the guest is lost: the client must see the end
            await stream.close()


def next_read_bytes(asked: int, came: int) -> int:
    """The size of the next read: doubled after a full one, halved after one that was filled to less than an eighth."""
    if came >= asked:
        return min(asked * 2, MAX_READ_BYTES)
    if came * 8 < asked:
        return max(asked // 2, FIRST_READ_BYTES)
    return asked


async def _write(stream: OutputStream, data: bytes | memoryview, progress: Progress) -> bool:
    """True if the client took `data`."""
    progress.blocked_writes += 1
    try:
        await stream.write(data)
    except ShimError as exc:
        log.warning("output dropped from here on", extra={"error": str(exc)})
        return False
    finally:
        progress.blocked_writes -= 1
        progress.move()
    return True


async def pump_input(read: Callable[[], Awaitable[bytes]], write: Callable[[memoryview], Awaitable[int]]) -> None:
    """The process has every byte that the client wrote. Raises what `write` raises."""
    while data := await read():
        view = memoryview(data)
        while view:
            chunk = view[:WRITE_BYTES]
            written = await write(chunk)
            if not 0 < written <= len(chunk):
                raise Internal(f"write stdin: the agent took {written} of {len(chunk)} bytes")
            view = view[written:]
