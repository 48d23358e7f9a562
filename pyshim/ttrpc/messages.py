"""The envelopes of a call to bytes and back, by the protobuf library. `envelope.proto` has their fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from .envelope_pb2 import KeyValue, Request, Response, Status
from .framing import Buffer

Parts: TypeAlias = tuple[Buffer, ...]
"""The bytes of a message, to be joined when its frame is made: a large payload is then copied once."""
_MAX_STATUS_TEXT_BYTES = 16 << 10
"""Bytes of a status text that are sent: an error is always small enough for a frame."""


_REQUEST_PAYLOAD, _RESPONSE_PAYLOAD = 0x1A, 0x12
"""Tags of the field `payload`: its number in envelope.proto, and that bytes with their length follow."""
_MOST_HEAD_BYTES = 6
"""Bytes before a payload: the tag and a length below 2^32."""


class MalformedMessage(ValueError):
    """Bytes that do not form a protobuf message, or a string field that is not UTF-8."""


class DecodedResponse(NamedTuple):
    """A decoded Response. Code 0 is success."""

    payload: bytes
    code: int = 0
    message: str = ""


def encode_request(
    service: str, method: str, payload: Buffer, timeout_ns: int = 0, metadata: Iterable[tuple[str, str]] = ()
) -> Parts:
    """Raises UnicodeEncodeError for text that UTF-8 cannot hold."""
    pairs = [KeyValue(key=key, value=value) for key, value in metadata]
    before = Request(service=service, method=method).SerializeToString()
    after = Request(timeout_nano=timeout_ns, metadata=pairs).SerializeToString()
    return before, _payload_head(_REQUEST_PAYLOAD, len(payload)), payload, after


def encode_response(payload: Buffer) -> Parts:
    """A success."""
    return _payload_head(_RESPONSE_PAYLOAD, len(payload)), payload


def encode_error(code: int, message: str) -> Parts:
    """Text that UTF-8 cannot hold is escaped and text over 16 KiB is cut: an error is answered in any case."""
    text = message.encode("utf-8", "backslashreplace")
    if len(text) > _MAX_STATUS_TEXT_BYTES:
        text = text[:_MAX_STATUS_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return (Response(status=Status(code=code, message=text)).SerializeToString(),)


def decode_request(data: Buffer) -> Request:
    """Raises MalformedMessage."""
    try:
        return Request.FromString(bytes(data))
    except DecodeError as error:
        raise MalformedMessage(str(error)) from error


def decode_response(data: Buffer) -> DecodedResponse:
    """Raises MalformedMessage."""
    view = memoryview(data)
    for head_bytes in range(2, _MOST_HEAD_BYTES + 1):
        if view[:head_bytes] == _payload_head(_RESPONSE_PAYLOAD, len(view) - head_bytes):
            return DecodedResponse(bytes(view[head_bytes:]))
    try:
        found = Response.FromString(bytes(view))
    except DecodeError as error:
        raise MalformedMessage(str(error)) from error
    return DecodedResponse(found.payload, found.status.code, found.status.message.decode("utf-8", "replace"))


def _payload_head(tag: int, payload_bytes: int) -> bytes:
    """The bytes before a payload. Message objects would copy a large payload three times, so they do not get it."""
    if payload_bytes <= 0:
        return b""
    head = bytearray((tag,))
    while payload_bytes > 0x7F:
        head.append(payload_bytes & 0x7F | 0x80)
        payload_bytes >>= 7
    head.append(payload_bytes)
    return bytes(head)
