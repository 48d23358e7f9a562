"""How much the pipes between client and process hold: what the kernel gives them, until that was too little."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.unit.host.stream_ends import client, input_from, output_to, read_to_end

pytestmark = pytest.mark.usefixtures("nothing_left")


def pipe_bytes(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


async def test_a_pipe_that_was_full_once_is_widened_and_no_other(fifo: Path) -> None:
    stdout = await output_to(fifo)
    reader = client(fifo, os.O_RDONLY)
    first = pipe_bytes(reader)

    await stdout.write(bytes(first))
    filled = pipe_bytes(reader)
    await stdout.write(b"more")

    assert (filled, pipe_bytes(reader)) == (first, 1 << 20)
    await stdout.close()
    assert await read_to_end(reader) == bytes(first) + b"more"
    os.close(reader)


async def test_a_stdin_that_came_as_a_full_pipe_is_widened_and_no_other(fifo: Path) -> None:
    stdin = await input_from(fifo)
    writer = client(fifo, os.O_WRONLY)
    first = pipe_bytes(writer)

    os.write(writer, b"line")
    assert await stdin.read() == b"line"
    after_a_line = pipe_bytes(writer)
    os.write(writer, bytes(first))
    assert await stdin.read() == bytes(first)

    assert (after_a_line, pipe_bytes(writer)) == (first, 1 << 20)
    await stdin.close()
    os.close(writer)
