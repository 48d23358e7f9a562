"""The protocol core: two cores back to back, and what a client's core refuses how."""

from __future__ import annotations

import pytest
from ttrpc_peers import frame, only, request

from pyshim.ttrpc.connection import ClientConnection, ServerConnection
from pyshim.ttrpc.events import RequestReceived, ResponseReceived
from pyshim.ttrpc.framing import DATA, HEADER, MAX_MESSAGE_BYTES, REQUEST, RESPONSE
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

    for again in (
        lambda: server.response(1, b""),
        lambda: server.error(1, 5, ""),
    ):
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
