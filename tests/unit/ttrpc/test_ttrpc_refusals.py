"""The protocol core of a server refuses bad frames; some close the connection."""

from __future__ import annotations

import pytest
from ttrpc_peers import frame, kinds, only, refusal, request

from pyshim.ttrpc.connection import ServerConnection
from pyshim.ttrpc.framing import DATA, FLAG_REMOTE_OPEN, REQUEST, RESPONSE
from pyshim.ttrpc.status import Code, LocalProtocolError


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

    assert refusal(server.receive_data(request(1)))[3] is True
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

    assert refused == (1, Code.UNIMPLEMENTED, "open stream 1: streaming is not implemented", False)
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
        True,
    )
    assert server.is_open(3)
