"""The protocol core: frames, two cores back to back, and what is refused."""

from __future__ import annotations

import pytest
from ttrpc_peers import frame, kinds, only, refusal, request

from pyshim.ttrpc.connection import ClientConnection, RequestReceived, ResponseReceived, ServerConnection
from pyshim.ttrpc.framing import DATA, FLAG_REMOTE_OPEN, HEADER, MAX_MESSAGE_BYTES, REQUEST, RESPONSE, FrameReader
from pyshim.ttrpc.messages import decode_response
from pyshim.ttrpc.status import Code, LocalProtocolError, MessageTooLarge, RemoteProtocolError


def test_unary_call_golden_bytes() -> None:
    client = ClientConnection()

    stream_id, data = client.request("a.B", "Get", b"\x08\x01", timeout_ns=5, metadata=[("k", "v")])

    assert stream_id == 1
    assert data == bytes.fromhex("00000018 00000001 01 00 0a03612e42 1203476574 1a020801 2005 2a060a016b120176")


def test_empty_success_is_a_frame_of_length_zero() -> None:
    server = ServerConnection()
    server.receive_data(request(1))

    assert server.response(1, b"") == bytes.fromhex("00000000 00000001 02 00")


def test_frame_of_length_zero_is_success() -> None:
    client = ClientConnection()
    client.request("s", "m", b"")

    event = only(client.receive_data(bytes.fromhex("00000000 00000001 02 00")))

    assert event == ResponseReceived(1, b"", 0, "")


def test_status_of_code_zero_is_success() -> None:
    client = ClientConnection()
    client.request("s", "m", b"")

    event = only(client.receive_data(frame(1, RESPONSE, 0, bytes.fromhex("0a00 12026869"))))

    assert event == ResponseReceived(1, b"hi", 0, "")


def test_request_reaches_the_server_whole() -> None:
    client, server = ClientConnection(), ServerConnection()

    _, data = client.request("s.S", "M", b"payload", timeout_ns=7, metadata=[("a", "b"), ("a", "c")])

    expected = RequestReceived(1, "s.S", "M", b"payload", 7, (("a", "b"), ("a", "c")))
    assert server.receive_data(data) == [expected]


def test_replies_may_come_in_any_order() -> None:
    client, server = ClientConnection(), ServerConnection()
    for name in ("a", "b", "c"):
        server.receive_data(client.request("s", name, b"")[1])

    replies = server.response(5, b"c") + server.error(1, Code.NOT_FOUND, "no") + server.response(3, b"b")

    assert client.receive_data(replies) == [
        ResponseReceived(5, b"c"),
        ResponseReceived(1, b"", 5, "no"),
        ResponseReceived(3, b"b"),
    ]
    assert (client.open_streams, server.open_streams) == (0, 0)


def test_error_without_a_code_is_unknown_and_never_success() -> None:
    server = ServerConnection()
    server.receive_data(request(1))

    assert decode_response(server.error(1, 0, "odd")[10:]).code == Code.UNKNOWN


def server_with_request(**options: int) -> ServerConnection:
    server = ServerConnection(**options)
    server.receive_data(request(1))
    return server


def test_a_stream_is_answered_once() -> None:
    server = server_with_request()
    server.response(1, b"")

    for again in (lambda: server.response(1, b""), lambda: server.error(1, 5, "")):
        with pytest.raises(LocalProtocolError):
            again()


def test_sender_refuses_what_exceeds_the_limit_and_the_stream_stays() -> None:
    server = server_with_request(max_message_bytes=100)

    with pytest.raises(MessageTooLarge):
        server.response(1, bytes(101))
    assert server.is_open(1)


def test_refused_request_uses_no_stream_id() -> None:
    client = ClientConnection(max_message_bytes=100)

    with pytest.raises(MessageTooLarge):
        client.request("s", "m", bytes(100))
    assert client.request("s", "m", b"")[0] == 1


def test_request_text_must_be_utf8() -> None:
    with pytest.raises(LocalProtocolError):
        ClientConnection().request("s", "m", b"", metadata=[("path", "/\udcff")])


def test_stream_ids_end_at_32_bits() -> None:
    client = ClientConnection()
    client._next_stream_id = 0xFFFFFFFF

    assert client.request("s", "m", b"")[0] == 0xFFFFFFFF
    with pytest.raises(LocalProtocolError):
        client.request("s", "m", b"")


def test_late_reply_of_a_forgotten_call_is_dropped() -> None:
    client, server = ClientConnection(), ServerConnection()
    server.receive_data(client.request("s", "m", b"")[1])

    client.forget(1)

    assert client.receive_data(server.response(1, b"late")) == []
    assert client.late_frames == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(3, RESPONSE, 0), id="reply to a stream never opened"),
        pytest.param(frame(2, RESPONSE, 0), id="reply to an even stream"),
        pytest.param(frame(0, DATA, 0), id="data on stream 0"),
        pytest.param(frame(1, REQUEST, 0), id="request"),
        pytest.param(frame(1, 9, 0, b"x"), id="unknown type"),
        pytest.param(frame(9, RESPONSE, 0, bytes(5 << 20)), id="oversize on an unknown stream"),
    ],
)
def test_client_ignores_and_counts_frames_that_answer_nothing(data: bytes) -> None:
    client = ClientConnection()
    client.request("s", "m", b"")

    assert client.receive_data(data) == []
    assert (client.ignored_frames, client.late_frames) == (1, 0)
    assert client.is_open(1)


def test_end_inside_a_frame_is_the_peers_fault() -> None:
    server = ServerConnection()
    server.receive_data(request(1)[:-1])

    assert isinstance(server.receive_eof(), RemoteProtocolError)


def test_end_between_frames_is_no_fault() -> None:
    server = ServerConnection()
    server.receive_data(request(1))

    assert server.receive_eof() is None
    assert server.open_streams == 0


def test_a_reply_above_the_calls_own_limit_fails_that_call_and_is_not_held() -> None:
    client = ClientConnection()
    stream_id, _ = client.request("s", "m", b"", max_reply_bytes=100)
    other, _ = client.request("s", "m", b"")

    events = client.receive_data(HEADER.pack(101, stream_id, RESPONSE, 0))
    assert [type(event).__name__ for event in events] == ["StreamFailed"]
    assert "reply of 101 bytes exceeds the limit of 100" in str(events[0].error)
    assert client.buffered_bytes == 0

    events = client.receive_data(bytes(101) + HEADER.pack(102, other, RESPONSE, 0) + b"\x12\x64" + bytes(100))
    assert [(event.stream_id, len(event.payload)) for event in events] == [(other, 100)]


def test_nothing_of_a_reply_to_no_call_is_held() -> None:
    client = ClientConnection()
    client.receive_data(HEADER.pack(MAX_MESSAGE_BYTES, 7, RESPONSE, 0))
    assert client.buffered_bytes == 0


@pytest.mark.parametrize("stream_id", [0, 2, 0xFFFFFFFE])
def test_even_stream_id_is_invalid(stream_id: int) -> None:
    assert refusal(ServerConnection().receive_data(request(stream_id)))[:2] == (stream_id, Code.INVALID_ARGUMENT)


@pytest.mark.parametrize("stream_id", [5, 3, 1])
def test_stream_id_must_rise(stream_id: int) -> None:
    server = ServerConnection()
    server.receive_data(request(5))
    server.response(5, b"")

    assert refusal(server.receive_data(request(stream_id)))[:2] == (stream_id, Code.INVALID_ARGUMENT)


def test_reused_id_of_an_open_stream_ends_that_stream() -> None:
    server = ServerConnection()
    server.receive_data(request(1))

    assert refusal(server.receive_data(request(1)))[0] == 1
    with pytest.raises(LocalProtocolError):
        server.response(1, b"")


def test_malformed_request_is_invalid_and_the_connection_goes_on() -> None:
    server = ServerConnection()

    assert refusal(server.receive_data(frame(1, REQUEST, 0, b"\x0a\x05ab")))[:2] == (1, Code.INVALID_ARGUMENT)
    assert kinds(server.receive_data(request(3))) == ["RequestReceived"]


def test_oversize_request_is_exhausted_and_the_connection_goes_on() -> None:
    server = ServerConnection()
    data = frame(1, REQUEST, 0, bytes(5 << 20)) + request(3)

    events = server.receive_data(data)

    assert refusal(events[:1])[:2] == (1, Code.RESOURCE_EXHAUSTED)
    assert kinds(events[1:]) == ["RequestReceived"]


@pytest.mark.parametrize("flags", [FLAG_REMOTE_OPEN, FLAG_REMOTE_OPEN | 1, 0xFF])
def test_a_request_that_announces_a_stream_is_not_implemented_and_its_data_is_dropped(flags: int) -> None:
    server = ServerConnection()

    refused = refusal(server.receive_data(request(1, flags=flags)))

    assert refused == (1, Code.UNIMPLEMENTED, "open stream 1: streaming is not implemented")
    assert server.receive_data(frame(1, DATA, 0, b"x") + frame(1, DATA, 5)) == []
    assert kinds(server.receive_data(request(3))) == ["RequestReceived"]


def test_a_request_that_says_no_data_follows_is_a_unary_call() -> None:
    assert kinds(ServerConnection().receive_data(request(1, flags=1))) == ["RequestReceived"]


def test_more_open_streams_than_allowed_are_exhausted() -> None:
    server = ServerConnection(max_open_streams=2)
    server.receive_data(request(1) + request(3))

    assert refusal(server.receive_data(request(5)))[:2] == (5, Code.RESOURCE_EXHAUSTED)
    server.response(1, b"")
    assert kinds(server.receive_data(request(7))) == ["RequestReceived"]


@pytest.mark.parametrize("timeout_ns", [-1, -(2**63), 0])
def test_timeout_of_zero_or_below_means_none(timeout_ns: int) -> None:
    event = only(ServerConnection().receive_data(request(1, timeout_ns=timeout_ns)))

    assert event.timeout_ns == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("type_", [0, RESPONSE, 4, 255])
def test_frame_types_without_meaning_for_a_server_are_ignored(type_: int) -> None:
    server = ServerConnection()

    assert server.receive_data(frame(1, type_, 0xFF, b"junk") + request(1))[0].stream_id == 1
    assert server.ignored_frames == 1


def test_data_for_a_stream_that_never_was_is_invalid() -> None:
    assert refusal(ServerConnection().receive_data(frame(1, DATA, 0, b"x")))[:2] == (1, Code.INVALID_ARGUMENT)


def test_data_that_crossed_with_the_final_answer_is_dropped() -> None:
    server = ServerConnection()
    server.receive_data(request(1))
    server.error(1, Code.ABORTED, "enough")

    assert server.receive_data(frame(1, DATA, 0, b"late")) == []


@pytest.mark.parametrize("size", [1, 5 << 20])
def test_data_on_a_unary_call_is_invalid_and_ends_it(size: int) -> None:
    server = ServerConnection()
    server.receive_data(request(1) + request(3))

    assert refusal(server.receive_data(frame(1, DATA, 0, bytes(size)))) == (
        1,
        Code.INVALID_ARGUMENT,
        "data on stream 1: the client had closed its side",
    )
    assert server.is_open(3)


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
