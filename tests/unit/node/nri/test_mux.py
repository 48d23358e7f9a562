"""The multiplexed connection: its frames at every split, what breaks it, and streams over a real socket."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from pyshim.node.nri.mux import MAX_PAYLOAD_BYTES, SENT_PAYLOAD_BYTES, Mux, MuxError, MuxFrameReader


def _frame(stream: int, payload: bytes) -> bytes:
    return struct.pack(">II", stream, len(payload)) + payload


def _read_to_end(data: bytes) -> None:
    reader = MuxFrameReader()
    reader.feed(data)
    reader.end()


def _joined(parts: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Neighbours of one stream as one."""
    found: list[tuple[int, bytes]] = []
    for stream, part in parts:
        if found and found[-1][0] == stream:
            found[-1] = (stream, found[-1][1] + part)
        else:
            found.append((stream, part))
    return found


def test_payloads_are_the_same_wherever_the_bytes_are_split() -> None:
    sent = [(1, b"configure"), (2, b"r"), (1, b""), (7, b"unknown"), (2, b"reply")]
    data = b"".join(_frame(*each) for each in sent)

    for at in range(len(data) + 1):
        reader = MuxFrameReader()
        parts = reader.feed(data[:at]) + reader.feed(data[at:])
        reader.end()
        assert _joined(parts) == [(1, b"configure"), (2, b"r"), (7, b"unknown"), (2, b"reply")]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (_frame(0, b"x"), "the number 0, which is reserved"),
        (struct.pack(">II", 1, MAX_PAYLOAD_BYTES + 1), f"{MAX_PAYLOAD_BYTES + 1} bytes exceed the limit"),
        (b"GET / HTTP/1.1\r\n", "bytes exceed the limit"),
        (b"\0\0\0", "ended inside a frame"),
        (_frame(1, b"half")[:-1], "ended inside a frame"),
    ],
    ids=["stream 0", "oversize", "garbage", "end in a header", "end in a payload"],
)
def test_broken_bytes_are_named(data: bytes, text: str) -> None:
    with pytest.raises(MuxError, match=text):
        _read_to_end(data)


def test_the_largest_frame_is_read_without_a_buffer() -> None:
    reader = MuxFrameReader()

    assert reader.feed(struct.pack(">II", 1, MAX_PAYLOAD_BYTES)) == []
    assert reader.feed(bytes(1000)) == [(1, bytes(1000))]
    assert len(reader.feed(bytes(MAX_PAYLOAD_BYTES - 1000))) == 1
    reader.end()


async def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            break
        data += part
    return data


def _opened(mux: Mux, *streams: int) -> list[socket.socket]:
    ends = [mux.open(stream) for stream in streams]
    for end in ends:
        end.setblocking(False)
    return ends


async def test_two_ends_exchange_bytes_on_two_streams_at_once() -> None:
    one, other = (Mux(sock) for sock in socket.socketpair())
    near, far = _opened(one, 1, 2), _opened(other, 1, 2)
    carrying = [asyncio.ensure_future(mux.run()) for mux in (one, other)]
    loop = asyncio.get_running_loop()
    large = bytes(range(256)) * 1024
    sending = [
        asyncio.ensure_future(loop.sock_sendall(near[0], large)),
        asyncio.ensure_future(loop.sock_sendall(far[1], large[::-1])),
        asyncio.ensure_future(loop.sock_sendall(near[1], b"small")),
    ]

    got = await asyncio.gather(_read(far[1], 5), _read(far[0], len(large)), _read(near[1], len(large)))

    assert tuple(got) == (b"small", large, large[::-1])
    await asyncio.gather(*sending)
    near[0].close()
    await asyncio.gather(*carrying)
    assert await _read(far[0], 1) == b""
    for sock in (*near, *far):
        sock.close()


async def test_sent_frames_fit_into_the_buffer_of_gos_reader() -> None:
    trunk, peer = socket.socketpair()
    peer.setblocking(False)
    mux = Mux(trunk)
    (near,) = _opened(mux, 2)
    carrying = asyncio.ensure_future(mux.run())
    await asyncio.get_running_loop().sock_sendall(near, bytes(10_000))
    got = 0
    while got < 10_000:
        stream, size = struct.unpack(">II", await _read(peer, 8))
        assert stream == 2
        assert 0 < size <= SENT_PAYLOAD_BYTES
        got += len(await _read(peer, size))
    peer.close()
    await carrying
    near.close()


async def test_bytes_written_before_a_stream_is_closed_are_sent() -> None:
    trunk, peer = socket.socketpair()
    mux = Mux(trunk)
    (near,) = _opened(mux, 1)
    near.send(b"last words")
    near.close()

    await mux.run()

    assert peer.recv(100) == _frame(1, b"last words")
    assert peer.recv(100) == b""
    peer.close()


@pytest.mark.parametrize(
    ("sent", "text"),
    [(_frame(0, b"x"), "reserved"), (_frame(1, b"half")[:-1], "ended inside a frame"), (b"", "")],
    ids=["reserved stream", "half a frame", "plain end"],
)
async def test_the_end_of_the_connection_is_the_end_of_every_stream(sent: bytes, text: str) -> None:
    trunk, peer = socket.socketpair()
    mux = Mux(trunk)
    ends = _opened(mux, 1, 2)
    peer.send(sent)
    peer.shutdown(socket.SHUT_WR)
    if text:
        with pytest.raises(MuxError, match=text):
            await mux.run()
    else:
        await mux.run()
    for end in ends:
        while await _read(end, 1000):
            pass
        end.close()
    assert peer.recv(1) == b""
    peer.close()


async def test_bytes_for_an_unopened_stream_are_dropped() -> None:
    trunk, peer = socket.socketpair()
    mux = Mux(trunk)
    (near,) = _opened(mux, 1)
    peer.send(_frame(9, b"unopened") + _frame(1, b"opened"))
    peer.shutdown(socket.SHUT_WR)

    await mux.run()

    assert await _read(near, 100) == b"opened"
    near.close()
    peer.close()


async def test_a_reader_that_does_not_read_holds_back_the_peer_instead_of_filling_memory() -> None:
    trunk, peer = socket.socketpair()
    peer.setblocking(False)
    mux = Mux(trunk)
    (near,) = _opened(mux, 1)
    carrying = asyncio.ensure_future(mux.run())
    sent = 0
    payload = _frame(1, bytes(1 << 16))
    for _ in range(1000):  # of 64 MiB; the kernel takes some hundred KiB for each of the two sockets
        try:
            sent += peer.send(payload[sent % len(payload) :])
        except BlockingIOError:
            await asyncio.sleep(0)
            try:
                sent += peer.send(payload[sent % len(payload) :])
            except BlockingIOError:
                break

    assert sent < 16 << 20
    peer.close()
    near.close()
    with pytest.raises(MuxError):
        await carrying
