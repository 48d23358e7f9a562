"""Streams against a client that does what containerd's clients do: opens late, reads slowly, vanishes, comes back."""

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pyshim.host.streams import fifos
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from tests.unit.host.stream_ends import client, input_from, opened, output_to, read_to_end, stalled

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_output_opens_without_a_reader_and_keeps_what_was_written_until_one_comes(fifo: Path) -> None:
    stdout = await output_to(fifo)
    await stdout.write(b"early")

    reader = client(fifo, os.O_RDONLY)
    await stdout.close()

    assert await read_to_end(reader) == b"early"
    os.close(reader)


async def test_a_slow_reader_makes_the_writer_wait_and_loses_nothing(fifo: Path) -> None:
    data = os.urandom(3 << 20)
    stdout = await output_to(fifo)
    reader = client(fifo, os.O_RDONLY)
    writing = asyncio.create_task(stdout.write(data))
    assert await stalled(writing)

    async def finish() -> None:
        await writing
        await stdout.close()

    _, received = await asyncio.gather(finish(), read_to_end(reader))

    assert received == data
    os.close(reader)


async def test_a_reader_that_vanishes_and_comes_back_finds_the_stream_alive(fifo: Path) -> None:
    stdout = await output_to(fifo)
    first = client(fifo, os.O_RDONLY)
    await stdout.write(b"one")
    assert os.read(first, 100) == b"one"
    os.close(first)

    await stdout.write(b"two")
    second = client(fifo, os.O_RDONLY)
    await stdout.close()

    assert await read_to_end(second) == b"two"
    os.close(second)


async def test_a_stream_is_finished_once_its_reader_has_taken_every_byte(fifo: Path) -> None:
    stdout = await output_to(fifo)
    reader = client(fifo, os.O_RDONLY)
    await stdout.write(b"x" * 50_000)
    finishing = asyncio.ensure_future(stdout.finish())

    assert await stalled(finishing)
    assert len(os.read(reader, 49_999)) == 49_999
    assert await stalled(finishing)
    assert os.read(reader, 10) == b"x"
    await finishing

    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize("output", [b"", b"all of it"])
async def test_a_reader_that_comes_late_finds_the_end(fifo: Path, output: bytes) -> None:
    """containerd opens its end in a thread, which waits for a writer: for ever, if ours had come and gone before."""
    stdout = await output_to(fifo)
    await stdout.write(output)
    finishing = asyncio.ensure_future(stdout.finish())
    await asyncio.sleep(0.01)

    reading = asyncio.ensure_future(asyncio.to_thread(fifo.read_bytes))
    await finishing

    if await stalled(reading):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))  # lets the thread end
        await reading
        pytest.fail("the reader waits")
    assert await reading == output


async def test_an_end_without_output_is_not_kept_from_a_reader_that_has_gone(
    fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fifos, "UNREAD_S", 1000)
    reader = client(fifo, os.O_RDONLY)
    stdout = await output_to(fifo)
    os.close(reader)

    await stdout.finish()


@pytest.mark.parametrize("end", ["no reader", "close"])
async def test_finishing_ends_without_a_reader(fifo: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(fifos, "UNREAD_S", 0.01 if end == "no reader" else 1000)

    stdout = await output_to(fifo)
    await stdout.write(b"unread")
    finishing = asyncio.ensure_future(stdout.finish())

    if end == "close":
        assert await stalled(finishing)
        await stdout.close()
    await finishing


async def test_finishing_ends_with_a_reader_that_is_too_slow(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fifos, "UNREAD_S", 1000)
    monkeypatch.setattr(fifos, "FINISH_S", 0.1)

    stdout = await output_to(fifo)
    reader = client(fifo, os.O_RDONLY)
    await stdout.write(b"x" * 50_000)
    finishing = asyncio.ensure_future(stdout.finish())
    while not finishing.done():
        os.read(reader, 1)
        await asyncio.sleep(0.001)
    await finishing
    os.close(reader)


async def test_closing_ends_a_write_without_a_reader(fifo: Path) -> None:
    stdout = await output_to(fifo)
    writing = asyncio.create_task(stdout.write(bytes(4 << 20)))
    assert await stalled(writing)

    await stdout.close()
    await writing
    await stdout.write(b"after the end")

    await stdout.close()


async def test_a_cancelled_write_leaves_the_stream_usable(fifo: Path) -> None:
    stdout = await output_to(fifo)
    reader = client(fifo, os.O_RDONLY)
    writing = asyncio.create_task(stdout.write(bytes(4 << 20)))
    assert await stalled(writing)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert os.read(reader, 4 << 20)

    await stdout.write(b"next")

    await stdout.close()
    assert (await read_to_end(reader)).endswith(b"next")
    os.close(reader)


async def test_stdin_gives_every_byte_before_its_end_when_closed_in_the_middle(fifo: Path) -> None:
    data = os.urandom(2 << 20)
    stdin = await input_from(fifo)
    writer = client(fifo, os.O_WRONLY)
    os.set_blocking(writer, True)

    async def feed() -> None:
        await asyncio.to_thread(lambda: [os.write(writer, data[i : i + 65536]) for i in range(0, len(data), 65536)])
        os.close(writer)
        stdin.close_io()

    async def drain() -> bytes:
        return b"".join([chunk async for chunk in chunks(stdin.read)])

    _, received = await asyncio.gather(feed(), drain())

    assert received == data
    await stdin.close()


async def chunks(read: Callable[[], Awaitable[bytes]]):  # type: ignore[no-untyped-def]
    while chunk := await read():
        yield chunk


async def test_a_client_closing_stdin_is_not_its_end_until_close_io(fifo: Path) -> None:
    stdin = await input_from(fifo)
    writer = client(fifo, os.O_WRONLY)
    os.write(writer, b"one")
    os.close(writer)
    assert await stdin.read() == b"one"
    waiting = asyncio.create_task(stdin.read())
    assert await stalled(waiting)

    again = client(fifo, os.O_WRONLY)
    os.write(again, b"two")
    assert await waiting == b"two"
    os.close(again)
    last = asyncio.create_task(stdin.read())
    assert await stalled(last)
    stdin.close_io()

    assert await last == b""
    stdin.close_io()
    await stdin.close()


async def test_close_io_before_the_client_is_done_does_not_truncate(fifo: Path) -> None:
    stdin = await input_from(fifo)
    writer = client(fifo, os.O_WRONLY)
    os.write(writer, b"one ")
    stdin.close_io()
    assert await stdin.read() == b"one "
    waiting = asyncio.create_task(stdin.read())
    assert await stalled(waiting)

    os.write(writer, b"two")
    assert await waiting == b"two"
    os.close(writer)

    assert await stdin.read() == b""
    await stdin.close()


async def test_closing_wakes_the_reader_of_stdin(fifo: Path) -> None:
    stdin = await input_from(fifo)
    waiting = asyncio.create_task(stdin.read())
    assert await stalled(waiting)

    await stdin.close()

    assert await waiting == b""


async def test_no_names_mean_no_streams() -> None:
    streams = await opened()

    assert (streams.stdin, streams.stdout, streams.stderr) == (None, None, None)
    await streams.close()


async def test_a_terminal_has_no_stderr(fifo: Path) -> None:
    streams = await opened(stdout=fifo, stderr=fifo, terminal=True)

    assert streams.stdout is not None
    assert streams.stderr is None
    await streams.close()


async def test_a_fifo_may_be_given_as_a_uri(fifo: Path) -> None:
    streams = await opened(stdin=f"fifo://{fifo}", stdout=f"fifo://{fifo}")
    assert streams.stdin is not None
    assert streams.stdout is not None

    await streams.stdout.write(b"round")

    assert await streams.stdin.read() == b"round"
    await streams.close()


async def test_a_plain_file_is_appended_to_by_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")

    streams = await opened(stdout=log, stderr=log)
    assert streams.stdout is not None
    assert streams.stderr is not None

    await streams.stdout.write(b"out\n")
    await streams.stderr.write(b"err\n")
    await streams.stdout.write(b"out\n")

    await streams.close()

    assert log.read_text() == "before\nout\nerr\nout\n"


async def test_a_file_uri_makes_the_file_and_its_directories_for_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "a/b c/log"

    before = os.umask(0o022)
    try:
        streams = await opened(stdout=f"file://{tmp_path}/a/b%20c/log", stderr=f"file://{tmp_path}/ignored")
        assert streams.stdout is not None
        assert streams.stderr is not None

        await streams.stdout.write(b"out\n")
        await streams.stderr.write(b"err\n")

        await streams.close()
    finally:
        os.umask(before)
    assert log.read_text() == "out\nerr\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o644
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o755
    assert not (tmp_path / "ignored").exists()


async def test_a_file_as_stdin_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"text")

    stdin = await input_from(tmp_path / "input")

    assert await stdin.read() == b"text"
    assert await stdin.read() == b""
    await stdin.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
async def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    stdout = await output_to("/dev/full")

    with pytest.raises(FailedPrecondition, match="write '/dev/full': ENOSPC"):
        await stdout.write(b"x")
    await stdout.close()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        pytest.param({"stdin": "/nowhere/in"}, "open stdin '/nowhere/in': No such file", id="stdin"),
        pytest.param({"stdout": "/nowhere/out"}, "open stdout '/nowhere/out': No such file", id="stdout"),
        pytest.param({"stderr": "/nowhere/err"}, "open stderr '/nowhere/err': No such file", id="stderr"),
        pytest.param({"stdout": "binary://[]"}, "does not appear to be an IPv4 or IPv6 address", id="no address"),
        pytest.param({"stdout": "file://["}, "Invalid IPv6 URL", id="half an address"),
        pytest.param({"stdout": "/fifo\0"}, "null byte", id="null byte"),
        pytest.param({"stdout": "npipe:////./pipe/x"}, "scheme 'npipe' is not one of", id="foreign scheme"),
        pytest.param({"stdout": "unix:///s?streaming_id=a-stdout"}, "scheme 'unix' is not one of", id="streaming"),
        pytest.param({"stdout": "file://host/x"}, "absolute path", id="file on a host"),
        pytest.param({"stdout": "file://"}, "absolute path", id="file without path"),
        pytest.param({"stderr": "binary:///bin/true"}, "only be given as stdout", id="log program as stderr"),
        pytest.param({"stdin": "file:///x"}, "for output only", id="log as stdin"),
    ],
)
async def test_a_name_that_cannot_be_opened_is_an_invalid_argument_and_leaves_nothing_open(
    fifo: Path, names: dict[str, str], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await opened(**{"stdin": fifo, "stdout": fifo, "stderr": fifo, **names})


def test_a_stdin_that_blocks_for_ever_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    """A terminal without a typist: the read cannot be ended, so nothing may wait for it."""
    script = tmp_path / "reads.py"
    script.write_text(
        "import asyncio, os, tty\n"
        "from pyshim.host.streams.opening import open_file_input\n"
        "master, slave = os.openpty()\n"
        "tty.setraw(slave)\n"
        "async def main():\n"
        "    stdin = open_file_input(os.ttyname(slave))\n"
        "    reading = asyncio.create_task(stdin.read())\n"
        "    await asyncio.sleep(0.1)\n"
        "    assert not reading.done()\n"
        "    reading.cancel()\n"
        "    await asyncio.gather(reading, return_exceptions=True)\n"
        "    await stdin.close()\n"
        "    print('closed', flush=True)\n"
        "asyncio.run(main())\n"
    )
    project = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


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
