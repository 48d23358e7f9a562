"""The guest agent's ends of a process's streams."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from guest_agent_client import PATIENCE_S, cgroup2_root, remove_cgroup

from guest.agent.errors import FailedPrecondition
from guest.agent.streams import EdgeEvents, ReadEnd, WriteEnd


@asynccontextmanager
async def a_pipe() -> AsyncIterator[tuple[ReadEnd, WriteEnd]]:
    read_fd, write_fd = os.pipe()
    source, sink = ReadEnd(read_fd), WriteEnd(write_fd)
    try:
        yield source, sink
    finally:
        source.close()
        sink.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("fast_clock")
async def test_a_read_waits_for_data_and_ends_empty_for_ever() -> None:
    async with a_pipe() as (source, sink):
        reading = asyncio.create_task(source.read(10))
        await turns()
        assert not reading.done()

        await sink.write(b"hello")
        assert await reading == b"hello"
        sink.close()

        assert [await source.read(10) for _ in range(2)] == [b"", b""]


@pytest.mark.usefixtures("fast_clock")
async def test_a_write_larger_than_the_pipe_waits_for_a_reader_and_keeps_order() -> None:
    async with a_pipe() as (source, sink):
        first = asyncio.create_task(sink.write(b"a" * 200_000))
        second = asyncio.create_task(sink.write(b"b"))
        finishing = asyncio.create_task(sink.finish())
        await turns()
        assert not first.done()

        data = b""
        while chunk := await source.read(65536):
            data += chunk

        assert data == b"a" * 200_000 + b"b"
        await asyncio.gather(first, second, finishing)


@pytest.mark.usefixtures("fast_clock")
async def test_closing_a_source_ends_a_waiting_read() -> None:
    async with a_pipe() as (source, _sink):
        reading = asyncio.create_task(source.read(10))
        await turns()

        source.close()

        assert await reading == b""


@pytest.mark.usefixtures("fast_clock")
async def test_a_cancelled_read_leaves_the_next_one_its_bytes() -> None:
    async with a_pipe() as (source, sink):
        given_up = asyncio.create_task(source.read(10))
        await turns()
        given_up.cancel()
        await turns()

        await sink.write(b"x")

        assert await source.read(10) == b"x"


@pytest.mark.usefixtures("fast_clock")
async def test_a_read_cancelled_when_the_bytes_are_there_already_leaves_them() -> None:
    async with a_pipe() as (source, sink):
        given_up = asyncio.create_task(source.read(10))
        await turns()

        await sink.write(b"x")
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)

        assert await source.read(10) == b"x"


@pytest.mark.usefixtures("fast_clock")
async def test_a_source_is_unread_when_no_read_waits_or_came_since_the_last_question() -> None:
    async with a_pipe() as (source, sink):
        assert source.is_unread()
        await sink.write(b"x")
        await source.read(10)
        assert [source.is_unread() for _ in range(2)] == [False, True]

        waiting = asyncio.create_task(source.read(10))
        await turns()
        assert [source.is_unread() for _ in range(2)] == [False, False]

        source.close()
        assert source.is_unread()
        assert await waiting == b""


@pytest.mark.usefixtures("fast_clock")
async def test_a_write_without_a_reader_is_refused() -> None:
    async with a_pipe() as (source, sink):
        source.close()

        with pytest.raises(FailedPrecondition, match="closed"):
            await sink.write(b"x")
        assert sink.closed


@pytest.mark.usefixtures("fast_clock")
async def test_closing_a_sink_ends_a_blocked_write() -> None:
    async with a_pipe() as (_source, sink):
        writing = asyncio.create_task(sink.write(bytes(1 << 20)))
        await turns()

        sink.close()

        with pytest.raises(FailedPrecondition):
            await writing


@pytest.mark.usefixtures("fast_clock")
async def test_a_terminals_hangup_is_its_end() -> None:
    master, slave = os.openpty()
    source = ReadEnd(master)
    os.write(slave, b"bye")
    os.close(slave)

    assert await source.read(100) == b"bye"
    assert await source.read(100) == b""


@pytest.mark.usefixtures("fast_clock")
async def test_news_of_a_file_come_once_each_though_its_state_lasts() -> None:
    ours, theirs = socket.socketpair()
    seen: list[int] = []
    news = EdgeEvents(ours.fileno(), select.EPOLLIN, lambda: seen.append(1))
    with ours, theirs:
        for number in range(1, 3):
            theirs.send(b"x")  # never read
            await turns(20)
            assert len(seen) == number
        news.close()
        theirs.send(b"x")
        await turns()
    news.close()

    assert len(seen) == 2


@pytest.mark.root
def test_a_kernel_file_that_changes_is_news() -> None:
    """As `memory.events` of a container's cgroup is, for which this machine may have no controller."""
    group = cgroup2_root() / f"guest-news-test-{os.getpid()}"
    group.mkdir()

    async def changes() -> list[str]:
        seen: list[str] = []
        arrived = asyncio.Event()
        with (group / "cgroup.events").open("rb", buffering=0) as file:

            def look() -> None:
                populated = os.pread(file.fileno(), 100, 0).split()[1].decode()
                if seen[-1] != populated:
                    seen.append(populated)
                    arrived.set()

            seen.append(os.pread(file.fileno(), 100, 0).split()[1].decode())
            news = EdgeEvents(file.fileno(), select.EPOLLPRI, look)
            (group / "cgroup.procs").write_text(str(sleeper.pid))
            await asyncio.wait_for(arrived.wait(), PATIENCE_S)
            arrived.clear()
            sleeper.kill()
            await asyncio.wait_for(arrived.wait(), PATIENCE_S)
            news.close()
        return seen

    try:
        with subprocess.Popen(["sleep", "1000"]) as sleeper:
            assert asyncio.run(changes()) == ["0", "1", "0"]
    finally:
        remove_cgroup(group)
