"""Frames: cutting a byte stream, however it is chopped, within a memory bound."""

from __future__ import annotations

import pytest

from pyshim.ttrpc.framing import DATA, HEADER, MAX_MESSAGE_BYTES, REQUEST, RESPONSE, FrameReader

STREAM = b"".join(
    (
        HEADER.pack(0, 1, RESPONSE, 0),
        HEADER.pack(3, 3, REQUEST, 2) + b"abc",
        HEADER.pack(1, 0xFFFFFFFF, DATA, 5) + b"\0",
        HEADER.pack(0, 5, 255, 255),
        HEADER.pack(300, 7, REQUEST, 0) + b"x" * 300,
    )
)
FRAMES = [
    (1, RESPONSE, 0, b"", 0),
    (3, REQUEST, 2, b"abc", 0),
    (0xFFFFFFFF, DATA, 5, b"\0", 0),
    (5, 255, 255, b"", 0),
    (7, REQUEST, 0, b"x" * 300, 0),
]


def fed(reader: FrameReader, data: bytes) -> list[tuple[int, int, int, bytes, int]]:
    return [(f.stream_id, f.type, f.flags, bytes(f.payload), f.discarded_bytes) for f in reader.feed(data)]


def received(reader: FrameReader, data: bytes, most: int) -> list[tuple[int, int, int, bytes, int]]:
    """Push `data` through the receive buffer, at most `most` bytes a time."""
    frames = []
    while data:
        buffer = reader.buffer()
        count = min(len(buffer), len(data), most)
        buffer[:count] = data[:count]
        data = data[count:]
        frames += [(f.stream_id, f.type, f.flags, bytes(f.payload), f.discarded_bytes) for f in reader.received(count)]
    return frames


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_frames_do_not_depend_on_where_the_stream_is_split(cut: int) -> None:
    reader = FrameReader()

    frames = fed(reader, STREAM[:cut]) + fed(reader, STREAM[cut:])

    assert frames == FRAMES
    assert not reader.mid_frame
    assert reader.buffered_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 10, 11, 64])
def test_frames_do_not_depend_on_chunk_size(size: int) -> None:
    reader = FrameReader()

    frames = [f for start in range(0, len(STREAM), size) for f in fed(reader, STREAM[start : start + size])]

    assert frames == FRAMES


@pytest.mark.parametrize("most", [1, 10, 4096, 16383, 16384, 65536, 1 << 22])
def test_receiving_into_the_buffer_equals_feeding(most: int) -> None:
    body = bytes(range(256)) * 400
    data = STREAM + HEADER.pack(len(body), 9, DATA, 0) + body + STREAM

    frames = received(FrameReader(), data, most)

    assert frames == [*FRAMES, (9, DATA, 0, body, 0), *FRAMES]


def test_a_large_payload_is_received_in_place() -> None:
    reader = FrameReader()
    body = b"y" * MAX_MESSAGE_BYTES
    reader.feed(HEADER.pack(len(body), 1, REQUEST, 0) + body[:100])

    at, frames = 100, []
    while not frames:
        buffer = reader.buffer()
        buffer[:] = body[at : at + len(buffer)]
        at += len(buffer)
        frames = reader.received(len(buffer))

    assert len(buffer) >= len(body) // 2 - 100
    assert frames[0].payload == body
    assert frames[0].payload.obj is buffer.obj


def test_payload_of_exactly_the_limit_is_taken() -> None:
    assert fed(FrameReader(8), HEADER.pack(8, 1, REQUEST, 0) + b"12345678") == [(1, REQUEST, 0, b"12345678", 0)]


@pytest.mark.parametrize("cut", range(50))
def test_oversize_frame_is_reported_once_and_skipped(cut: int) -> None:
    reader = FrameReader(8)
    data = HEADER.pack(20, 1, REQUEST, 0) + b"z" * 20 + HEADER.pack(2, 3, REQUEST, 0) + b"ok" + b"\0" * 8

    frames = fed(reader, data[:cut]) + fed(reader, data[cut:])

    assert frames == [(1, REQUEST, 0, b"", 20), (3, REQUEST, 0, b"ok", 0)]
    assert reader.buffered_bytes == 8  # the start of a third header
    assert reader.mid_frame


def test_oversize_frame_is_reported_before_its_payload_arrives() -> None:
    reader = FrameReader()

    frames = fed(reader, HEADER.pack(0xFFFFFFFF, 1, REQUEST, 0))

    assert frames == [(1, REQUEST, 0, b"", 0xFFFFFFFF)]
    assert reader.mid_frame
    assert reader.buffered_bytes == 0


def test_skipping_four_gigabytes_holds_nothing() -> None:
    reader = FrameReader()
    reader.feed(HEADER.pack(0xFFFFFFFF, 1, REQUEST, 0))
    chunk = bytes(1 << 20)

    held = {(len(reader.feed(chunk)), reader.buffered_bytes) for _ in range(4095)}
    last = fed(reader, bytes((1 << 20) - 1) + HEADER.pack(0, 3, DATA, 4))

    assert held == {(0, 0)}
    assert last == [(3, DATA, 4, b"", 0)]


def test_the_buffer_of_an_unfinished_frame_grows_as_its_bytes_come() -> None:
    reader = FrameReader()
    reader.feed(HEADER.pack(MAX_MESSAGE_BYTES, 1, REQUEST, 0))
    held = [reader.buffered_bytes]
    for _ in range(16):
        reader.feed(bytes(MAX_MESSAGE_BYTES // 16))
        held.append(reader.buffered_bytes)

    assert held[0] <= 64 << 10
    assert all(
        bytes_held <= max(64 << 10, 2 * index * MAX_MESSAGE_BYTES // 16) for index, bytes_held in enumerate(held)
    )
    assert held[-1] == 0
