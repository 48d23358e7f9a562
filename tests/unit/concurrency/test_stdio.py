"""Output moves by one read at a time, the next one during the write of the last, in pieces of a useful size."""

import asyncio

import pytest

from pyshim.concurrency.stdio import FIRST_READ_BYTES, MAX_READ_BYTES, Progress, next_read_bytes, pump_output
from pyshim.model.errors import FailedPrecondition


class Source:
    """Gives `chunks` in order, then the end; counts the reads that are under way."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = list(chunks)
        self.asked: list[int] = []
        self.under_way = self.most = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def read(self, size: int) -> bytes:
        self.asked.append(size)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.may_answer.wait()
            return self.chunks.pop(0) if self.chunks else b""
        finally:
            self.under_way -= 1


class Output:
    def __init__(self) -> None:
        self.data = bytearray()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.writing = asyncio.Event()
        self.broken: Exception | None = None
        self.finished = self.closed = False

    async def write(self, data: bytes | memoryview) -> None:
        self.writing.set()
        await self.may_write.wait()
        if self.broken:
            raise self.broken
        self.data += data

    async def finish(self) -> None:
        await self.may_finish.wait()
        self.finished = True

    async def close(self) -> None:
        self.closed = True


LARGE = b"x" * FIRST_READ_BYTES


async def test_output_arrives_whole_and_in_order_with_one_read_at_a_time() -> None:
    chunks = [bytes([number]) * (FIRST_READ_BYTES if number % 3 else 10) for number in range(1, 30)]
    source, output = Source(*chunks), Output()

    await pump_output(source.read, output, Progress())

    assert bytes(output.data) == b"".join(chunks)
    assert source.most == 1
    assert output.closed


async def test_the_next_read_is_under_way_while_a_large_chunk_is_written() -> None:
    source, output = Source(LARGE, LARGE), Output()
    output.may_write.clear()
    pump = asyncio.ensure_future(pump_output(source.read, output, Progress()))
    await output.writing.wait()

    assert len(source.asked) == 2

    output.may_write.set()
    await pump
    assert len(output.data) == 2 * FIRST_READ_BYTES


async def test_a_slow_reader_holds_back_all_but_one_read() -> None:
    source, output = Source(*[LARGE] * 10), Output()
    output.may_write.clear()
    pump = asyncio.ensure_future(pump_output(source.read, output, Progress()))
    await output.writing.wait()
    for _ in range(20):
        await asyncio.sleep(0)

    assert len(source.asked) == 2

    output.may_write.set()
    await pump
    assert len(output.data) == 10 * FIRST_READ_BYTES


async def test_output_is_over_once_its_reader_has_taken_all() -> None:
    source, output = Source(b"last words"), Output()
    output.may_finish.clear()
    pump = asyncio.ensure_future(pump_output(source.read, output, Progress()))
    for _ in range(20):
        await asyncio.sleep(0)

    assert (bytes(output.data), output.finished, pump.done()) == (b"last words", False, False)

    output.may_finish.set()
    await pump
    assert output.finished
    assert output.closed


async def test_a_pump_that_is_cancelled_leaves_no_read_behind() -> None:
    before = asyncio.all_tasks()
    source, output = Source(LARGE), Output()
    output.may_write.clear()
    pump = asyncio.ensure_future(pump_output(source.read, output, Progress()))
    await output.writing.wait()
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)

    assert source.under_way == 0
    assert output.closed
    assert asyncio.all_tasks() == before


async def test_output_without_a_client_is_read_to_its_end() -> None:
    source, output = Source(*[LARGE] * 5), Output()
    output.broken = FailedPrecondition("write: ENOSPC")

    await pump_output(source.read, output, Progress())
    assert not source.chunks

    await pump_output((none := Source(LARGE)).read, None, Progress())
    assert not none.chunks


@pytest.mark.parametrize(
    ("asked", "came", "expected"),
    [
        (FIRST_READ_BYTES, FIRST_READ_BYTES, 2 * FIRST_READ_BYTES),
        (MAX_READ_BYTES, MAX_READ_BYTES, MAX_READ_BYTES),
        (MAX_READ_BYTES, MAX_READ_BYTES // 2, MAX_READ_BYTES),
        (MAX_READ_BYTES, 100, MAX_READ_BYTES // 2),
        (FIRST_READ_BYTES, 1, FIRST_READ_BYTES),
    ],
)
def test_the_size_of_a_read_follows_what_comes(asked: int, came: int, expected: int) -> None:
    assert next_read_bytes(asked, came) == expected
