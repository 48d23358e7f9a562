"""The guest agent's ends of a process's streams."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from agent_loop import run, turns

from guest.agent.errors import FailedPrecondition
from guest.agent.runtime.loop import Loop, Task
from guest.agent.runtime.streams import Sink, Source


@pytest.fixture
def pipe(loop: Loop) -> Iterator[tuple[Source, Sink]]:
    read_fd, write_fd = os.pipe()
    source, sink = Source(loop, read_fd), Sink(loop, write_fd)
    yield source, sink
    source.close()
    sink.close()


def test_a_read_waits_for_data_and_ends_empty_for_ever(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)
    assert not reading.result.done

    run(loop, sink.write(b"hello"))
    loop.run_until(lambda: reading.result.done)
    sink.close()

    assert reading.result.value == b"hello"
    assert [run(loop, source.read(10)) for _ in range(2)] == [b"", b""]


def test_a_write_larger_than_the_pipe_waits_for_a_reader_and_keeps_order(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    first = loop.spawn("w1", sink.write(b"a" * 200_000))
    second = loop.spawn("w2", sink.write(b"b"))
    finishing = loop.spawn("f", sink.finish())
    turns(loop)
    assert not first.result.done

    async def read_all() -> bytes:
        data = b""
        while chunk := await source.read(65536):
            data += chunk
        return data

    assert run(loop, read_all()) == b"a" * 200_000 + b"b"
    assert second.result.done
    assert finishing.result.done


def test_closing_a_source_ends_a_waiting_read(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, _sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)

    source.close()
    loop.run_until(lambda: reading.result.done)

    assert reading.result.value == b""


def test_a_cancelled_read_leaves_the_next_one_its_bytes(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    given_up = loop.spawn("r", source.read(10))
    turns(loop)
    given_up.cancel()
    turns(loop)

    run(loop, sink.write(b"x"))

    assert run(loop, source.read(10)) == b"x"


def test_after_the_exit_a_silent_stream_ends_although_someone_holds_it_open(
    loop: Loop, pipe: tuple[Source, Sink]
) -> None:
    source, sink = pipe
    run(loop, sink.write(b"last words"))
    source.process_exited()

    assert run(loop, source.read(100)) == b"last words"
    assert run(loop, source.read(100)) == b""


def test_the_exit_ends_a_read_that_was_waiting_before(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, _sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)

    source.process_exited()
    loop.run_until(lambda: reading.result.done)

    assert reading.result.value == b""


def test_a_write_without_a_reader_is_refused(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    source.close()

    with pytest.raises(FailedPrecondition, match="closed"):
        run(loop, sink.write(b"x"))
    assert sink.closed


def test_closing_a_sink_ends_a_blocked_write(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    _source, sink = pipe
    writing: Task = loop.spawn("w", sink.write(bytes(1 << 20)))
    turns(loop)

    sink.close()
    loop.run_until(lambda: writing.result.done)

    assert isinstance(writing.result.error, FailedPrecondition)


def test_a_terminals_hangup_is_its_end(loop: Loop) -> None:
    master, slave = os.openpty()
    source = Source(loop, master)
    os.write(slave, b"bye")
    os.close(slave)

    assert run(loop, source.read(100)) == b"bye"
    assert run(loop, source.read(100)) == b""
