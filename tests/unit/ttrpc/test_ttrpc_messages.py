"""The envelopes: their bytes on the wire, what is refused, and texts that are no UTF-8."""

from __future__ import annotations

import grpc
import pytest

from pyshim.model.errors import ErrorCode
from pyshim.ttrpc.envelope_pb2 import Response, Status
from pyshim.ttrpc.messages import (
    DecodedResponse,
    MalformedMessage,
    decode_request,
    decode_response,
    encode_error,
    encode_request,
    encode_response,
)
from pyshim.ttrpc.status import Code


@pytest.mark.parametrize(
    ("encoded", "wire"),
    [
        (
            b"".join(encode_request("a.B", "Get", b"\x08\x01", 1_000_000_000, [("k", "v")])),
            "0a03612e42 1203476574 1a020801 208094ebdc03 2a060a016b120176",
        ),
        (b"".join(encode_response(b"")), ""),
        (b"".join(encode_response(b"hi")), "12026869"),
        (b"".join(encode_error(5, "gone")), "0a08 0805 1204676f6e65"),
    ],
    ids=["request", "empty success", "success", "error"],
)
def test_messages_are_these_bytes_on_the_wire(encoded: bytes, wire: str) -> None:
    assert encoded == bytes.fromhex(wire)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_envelopes_are_of_any_bytes(buffer: type) -> None:
    request = decode_request(buffer(b"".join(encode_request("s", "m", buffer(b"p")))))
    response = decode_response(buffer(b"".join(encode_response(buffer(b"q")))))

    assert (request.payload, response.payload) == (b"p", b"q")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 20, 1 << 21])
def test_payloads_of_any_size_are_as_the_library_writes_them(size: int) -> None:
    payload = bytes(size)

    assert b"".join(encode_response(payload)) == Response(payload=payload).SerializeToString()
    assert decode_response(b"".join(encode_response(payload))) == DecodedResponse(payload)
    assert decode_request(b"".join(encode_request("s", "m", payload))).payload == payload


def test_a_response_of_status_and_payload_has_both() -> None:
    whole = Response(status=Status(code=3, message=b"bad"), payload=b"p").SerializeToString()

    assert (
        decode_response(whole)
        == decode_response(b"\x12\x01p" + b"".join(encode_error(3, "bad")))
        == DecodedResponse(b"p", 3, "bad")
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x05abc", id="field cut short"),
        pytest.param(b"\x80" * 11, id="endless varint"),
        pytest.param(b"\x0b" * 200 + b"\x0c" * 200, id="groups 200 deep"),
        pytest.param(b"\x2a\x03\x0a\x05a", id="metadata pair cut short"),
        pytest.param(b"\x12\x01\xc0", id="method not UTF-8"),
    ],
)
def test_malformed_requests_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_request(data)


def test_unknown_fields_are_skipped() -> None:
    unknown = b"\x32\x03xyz" + b"\x38\x07" + b"\x45\x01\x02\x03\x04" + b"\x49" + b"\0" * 8 + b"\x53\x08\x01\x54"

    decoded = decode_request(unknown + b"".join(encode_request("s", "m", b"p")) + unknown)

    assert (decoded.service, decoded.method, decoded.payload) == ("s", "m", b"p")


def test_a_status_text_that_is_not_utf8_keeps_its_code() -> None:
    assert decode_response(bytes.fromhex("0a05 0805 1201ff")) == DecodedResponse(b"", 5, "\ufffd")


def test_status_text_with_an_undecodable_path_is_escaped() -> None:
    assert decode_response(b"".join(encode_error(2, "open '/a\udcff'"))).message == "open '/a\\udcff'"


def test_status_text_is_cut_between_characters() -> None:
    text = decode_response(b"".join(encode_error(2, "a" + "é" * 20_000))).message

    assert len(text.encode()) <= 16 << 10
    assert text.strip("é") == "a"


def test_every_code_has_grpcs_number() -> None:
    numbers = {code.name: code.value[0] for code in grpc.StatusCode}

    assert {name: number for name, number in vars(Code).items() if name.isupper()} == numbers
    assert {"OK": 0, **{code.name: int(code) for code in ErrorCode}} == numbers
