"""Moves a process's bytes between the client's streams on the host and the agent's calls, at the slower one's pace.

A stream has one read in flight, never two: kata-agent serves the calls of a connection in parallel, so the answers of
two reads may come in either order. What overlaps is the next read and the write of what has come.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pyshim.model.errors import Internal, ShimError
from pyshim.model.trace import mark
from pyshim.sandbox.seams import InputStream, OutputStream
from pyshim.sandbox.tasks import cancel_all

log = logging.getLogger("pyshim.sandbox.stdio")

FIRST_READ_BYTES = 64 * 1024
"""An agent sets so much aside for every read that waits: a quiet stream shall not cost much."""
MAX_READ_BYTES = 1024 * 1024
WRITE_BYTES = 1024 * 1024
"""Below ttrpc's limit of 4 MiB per message, envelope included."""


class Progress:
    """When bytes last moved, so that a drain can tell a busy stream from a held-open one."""

    def __init__(self) -> None:
        self.moves = 0
        self.blocked_writes = 0
        """Writes waiting for a slow reader just now."""
        self.stdin_bytes = 0
        self.stdout_bytes = 0
        self.stderr_bytes = 0
        """What has reached its reader."""


async def pump_output(
    read: Callable[[int], Awaitable[bytes | memoryview]],
    stream: OutputStream | None,
    progress: Progress,
    *,
    count: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """The process's output has reached its end and all of it is with the client.

    Without a client, or with one that no longer takes it, output is read all the same and dropped: a full disk or a
    dead log program must not stop the container. `count` is told of what the client took.
    """
    takes = stream is not None
    size = FIRST_READ_BYTES
    ahead: asyncio.Task[bytes | memoryview] | None = None
    try:
        while data := await (read(size) if ahead is None else ahead):
            if not progress.moves:
                mark("first output")
            progress.moves += 1
            ahead = None
            is_busy = len(data) >= FIRST_READ_BYTES
            size = next_read_bytes(size, len(data))
            if takes and stream is not None:
                if is_busy:
                    ahead = asyncio.ensure_future(read(size))
                    await asyncio.sleep(0)  # the request leaves before the write, which may take its time
                takes = await _write(stream, data, progress)
                if takes:
                    count(len(data))
    finally:
        if ahead is not None and not ahead.done():
            await cancel_all(ahead)
        if stream is not None:  # also when the guest is lost: the client must see the end
            await stream.close()


def next_read_bytes(asked: int, came: int) -> int:
    """What to ask for after a read of `asked` gave `came`: more while that is filled, less while it is far too big."""
    if came >= asked:
        return min(asked * 2, MAX_READ_BYTES)
    if came * 8 < asked:
        return max(asked // 2, FIRST_READ_BYTES)
    return asked


async def _write(stream: OutputStream, data: bytes | memoryview, progress: Progress) -> bool:
    """Whether the client took `data`."""
    progress.blocked_writes += 1
    try:
        await stream.write(data)
    except ShimError as exc:
        log.warning("output dropped from here on", extra={"error": str(exc)})
        return False
    finally:
        progress.blocked_writes -= 1
        progress.moves += 1
    return True


async def pump_input(stream: InputStream, write: Callable[[memoryview], Awaitable[int]]) -> None:
    """Every byte the client wrote, to its end, is with the process. Raises what `write` raises."""
    while data := await stream.read():
        view = memoryview(data)
        while view:
            chunk = view[:WRITE_BYTES]
            written = await write(chunk)
            if not 0 < written <= len(chunk):
                raise Internal(f"write stdin: the agent took {written} of {len(chunk)} bytes")
            view = view[written:]
