"""How much the pipes between client and process hold: what the kernel gives them, until that was too little."""

import fcntl
import os
from pathlib import Path

import pytest
from stream_ends import client, opened, read_to_end, run


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path, 0o700)
    return path


def pipe_bytes(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def test_a_pipe_that_was_full_once_is_widened_and_no_other(fifo: Path) -> None:
    async def body() -> None:
        streams = await opened(stdout=fifo)
        assert streams.stdout is not None
        reader = client(fifo, os.O_RDONLY)
        first = pipe_bytes(reader)

        await streams.stdout.write(bytes(first))
        filled = pipe_bytes(reader)
        await streams.stdout.write(b"more")

        assert (filled, pipe_bytes(reader)) == (first, 1 << 20)
        await streams.close()
        assert await read_to_end(reader) == bytes(first) + b"more"
        os.close(reader)

    run(body)


def test_a_stdin_that_came_as_a_full_pipe_is_widened_and_no_other(fifo: Path) -> None:
    async def body() -> None:
        streams = await opened(stdin=fifo)
        assert streams.stdin is not None
        writer = client(fifo, os.O_WRONLY)
        first = pipe_bytes(writer)

        os.write(writer, b"line")
        assert await streams.stdin.read() == b"line"
        after_a_line = pipe_bytes(writer)
        os.write(writer, bytes(first))
        assert await streams.stdin.read() == bytes(first)

        assert (after_a_line, pipe_bytes(writer)) == (first, 1 << 20)
        await streams.close()
        os.close(writer)

    run(body)
