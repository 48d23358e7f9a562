"""Moves a process's bytes between the client's streams on the host and the agent's calls, at the slower one's pace."""

import logging
from collections.abc import Awaitable, Callable

from pyshim.model.errors import Internal, ShimError
from pyshim.sandbox.seams import InputStream, OutputStream

log = logging.getLogger("pyshim.sandbox.stdio")

READ_BYTES = 256 * 1024
WRITE_BYTES = 1024 * 1024
"""Below ttrpc's limit of 4 MiB per message, envelope included."""


class Progress:
    """When bytes last moved, so that a drain can tell a busy stream from a held-open one."""

    def __init__(self) -> None:
        self.moves = 0
        self.blocked_writes = 0
        """Writes waiting for a slow reader just now."""


async def pump_output(read: Callable[[int], Awaitable[bytes]], stream: OutputStream | None, progress: Progress) -> None:
    """The process's output has reached its end and all of it is with the client.

    Without a client, or with one that no longer takes it, output is read all the same and dropped: a full disk or a
    dead log program must not stop the container.
    """
    takes = stream is not None
    try:
        while data := await read(READ_BYTES):
            progress.moves += 1
            if takes and stream is not None:
                takes = await _write(stream, data, progress)
    finally:
        if stream is not None:  # also when the guest is lost: the client must see the end
            await stream.close()


async def _write(stream: OutputStream, data: bytes, progress: Progress) -> bool:
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
