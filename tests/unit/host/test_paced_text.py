"""A process that prints without end waits; nothing of its output is lost."""

import asyncio
import os

from pyshim.host.fds import OwnedFd
from pyshim.host.streams import paced_text
from pyshim.host.streams.paced_text import BURST_BYTES, BURST_LINES, PacedText


def read_paced(data: bytes) -> tuple[list[str], list[int]]:
    """The lines that came, and how many had come at each pause."""
    lines: list[str] = []
    pauses: list[int] = []

    async def body() -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_fd, True)
        paced = PacedText(OwnedFd(read_fd), max_lines=3, on_line=lines.append)
        writing = asyncio.get_running_loop().run_in_executor(None, write_all, write_fd, data)
        async with asyncio.timeout(120):
            while paced._fd.is_open:
                if paced._resume is not None and (not pauses or pauses[-1] != len(lines)):
                    pauses.append(len(lines))
                await asyncio.sleep(0.001)
            await writing

    asyncio.run(body())
    return lines, pauses


def write_all(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def test_a_flood_of_short_lines_is_held_back_though_it_is_few_bytes() -> None:
    """512 KiB of empty-looking lines would be a quarter of a million log records."""
    count = 5 * BURST_LINES
    one_read = paced_text._READ_BYTES // 2

    lines, pauses = read_paced(b"x\n" * count)

    assert lines == ["x"] * count
    assert pauses
    assert all(after - before <= BURST_LINES + one_read for before, after in zip((0, *pauses), pauses, strict=False))


def test_a_flood_of_bytes_is_held_back_though_it_is_few_lines() -> None:
    line = b"y" * 1000 + b"\n"

    lines, pauses = read_paced(line * (2 * BURST_BYTES // len(line)))

    assert len(lines) == 2 * BURST_BYTES // len(line)
    assert pauses


def test_little_is_read_without_a_pause() -> None:
    lines, pauses = read_paced(b"one\ntwo")

    assert (lines, pauses) == (["one", "two"], [])
