"""The two envelope messages, hand-coded: Request and Response, with the KeyValue and Status messages in them.

Encoders return the bytes around the payload, so that a large payload is never copied into an envelope. Fields are
written in number order and defaults are left out, as every protobuf encoder does. Decoders skip unknown fields and
fields of an unexpected wire type (protobuf's rule) and raise `MalformedMessage` for anything that is not a well-formed
message. Source: Protocol Buffers encoding specification; field numbers of containerd/ttrpc request.proto and
google/rpc/status.proto.
"""

from __future__ import annotations

from collections.abc import Iterable

from .events import Metadata
from .framing import Buffer

_VARINT, _FIXED64, _LENGTH, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_U64 = (1 << 64) - 1
_MAX_STATUS_TEXT_BYTES = 16 << 10
"""Bytes of a status text that are sent: an error is always small enough for a frame."""
_MAX_FIELDS = 64
"""Fields of one message, unknown and repeated ones included: an envelope has up to five and its metadata. Four MiB of
empty fields would take seconds to decode, and much memory."""


class MalformedMessage(ValueError):
    """Bytes that do not form a protobuf message, or a string field that is not UTF-8."""


class Request:
    """A decoded `ttrpc.Request`."""

    __slots__ = ("metadata", "method", "payload", "service", "timeout_ns")

    def __init__(self, service: str, method: str, payload: bytes, timeout_ns: int, metadata: Metadata) -> None:
        self.service = service
        self.method = method
        self.payload = payload
        self.timeout_ns = timeout_ns
        self.metadata = metadata


class Response:
    """A decoded `ttrpc.Response`. An absent status reads as code 0."""

    __slots__ = ("code", "details", "message", "payload")

    def __init__(self, code: int, message: str, details: tuple[bytes, ...], payload: bytes) -> None:
        self.code = code
        self.message = message
        self.details = details
        self.payload = payload


def request_around(
    service: str, method: str, payload_bytes: int, timeout_ns: int = 0, metadata: Iterable[tuple[str, str]] = ()
) -> tuple[bytes, bytes]:
    """The bytes before and after a payload of `payload_bytes` in an encoded Request."""
    before = _text_field(0x0A, service) + _text_field(0x12, method) + _payload_head(0x1A, payload_bytes)
    after = b""
    if timeout_ns:
        after = b"\x20" + _encode_varint(timeout_ns & _U64)
    for key, value in metadata:
        after += _bytes_field(0x2A, _text_field(0x0A, key) + _text_field(0x12, value))
    return before, after


def response_before(payload_bytes: int, code: int = 0, message: str = "", details: Iterable[bytes] = ()) -> bytes:
    """The bytes before a payload of `payload_bytes` in an encoded Response; nothing follows it.

    Success is an absent status. Text that UTF-8 cannot hold is escaped and text over 16 KiB is cut: an error is
    answered in any case.
    """
    if not code:
        return _payload_head(0x12, payload_bytes)
    text = message.encode("utf-8", "backslashreplace")
    if len(text) > _MAX_STATUS_TEXT_BYTES:
        text = text[:_MAX_STATUS_TEXT_BYTES].decode("utf-8", "ignore").encode()
    status = b"\x08" + _encode_varint(code & _U64)
    if text:
        status += _bytes_field(0x12, text)
    for detail in details:
        status += _bytes_field(0x1A, detail)
    return _bytes_field(0x0A, status) + _payload_head(0x12, payload_bytes)


def decode_request(data: Buffer) -> Request:
    """The Request in `data`; its payload is an own copy. Raises MalformedMessage."""
    service = method = ""
    payload = b""
    timeout_ns = 0
    metadata: list[tuple[str, str]] = []
    view = memoryview(data)
    position, end = 0, len(view)
    fields = 0
    while position < end:
        fields = _counted(fields)
        tag, position = _read_varint(view, position, end)
        if tag == 0x20:
            timeout_ns, position = _read_varint(view, position, end)
            timeout_ns = _signed(timeout_ns, 64)
        elif tag in (0x0A, 0x12, 0x1A, 0x2A):
            start, position = _read_length(view, position, end)
            field = view[start:position]
            if tag == 0x1A:
                payload = bytes(field)
            elif tag == 0x0A:
                service = _text(field)
            elif tag == 0x12:
                method = _text(field)
            else:
                metadata.append(_decode_key_value(field))
        else:
            position = _skip(view, position, end, tag)
    return Request(service, method, payload, timeout_ns, tuple(metadata))


def decode_response(data: Buffer) -> Response:
    """The Response in `data`; its payload is an own copy. Raises MalformedMessage."""
    code, message = 0, ""
    details: list[bytes] = []
    payload = b""
    view = memoryview(data)
    position, end = 0, len(view)
    fields = 0
    while position < end:
        fields = _counted(fields)
        tag, position = _read_varint(view, position, end)
        if tag == 0x12:
            start, position = _read_length(view, position, end)
            payload = bytes(view[start:position])
        elif tag == 0x0A:
            start, position = _read_length(view, position, end)
            # A message field that occurs twice is merged: protobuf's rule.
            code, message = _decode_status(view[start:position], code, message, details)
        else:
            position = _skip(view, position, end, tag)
    return Response(code, message, tuple(details), payload)


def _decode_status(view: memoryview, code: int, message: str, details: list[bytes]) -> tuple[int, str]:
    position, end = 0, len(view)
    fields = 0
    while position < end:
        fields = _counted(fields)
        tag, position = _read_varint(view, position, end)
        if tag == 0x08:
            code, position = _read_varint(view, position, end)
            code = _signed(code & 0xFFFFFFFF, 32)
        elif tag in (0x12, 0x1A):
            start, position = _read_length(view, position, end)
            if tag == 0x12:
                # Broken bytes are replaced: the code of the reply matters more than its text.
                message = str(view[start:position], "utf-8", "replace")
            else:
                details.append(bytes(view[start:position]))
        else:
            position = _skip(view, position, end, tag)
    return code, message


def _decode_key_value(view: memoryview) -> tuple[str, str]:
    key = value = ""
    position, end = 0, len(view)
    fields = 0
    while position < end:
        fields = _counted(fields)
        tag, position = _read_varint(view, position, end)
        if tag in (0x0A, 0x12):
            start, position = _read_length(view, position, end)
            if tag == 0x0A:
                key = _text(view[start:position])
            else:
                value = _text(view[start:position])
        else:
            position = _skip(view, position, end, tag)
    return key, value


def _counted(fields: int) -> int:
    """One more than `fields`. Raises MalformedMessage beyond _MAX_FIELDS."""
    if fields >= _MAX_FIELDS:
        raise MalformedMessage(f"more than {_MAX_FIELDS} fields")
    return fields + 1


def _text(view: memoryview) -> str:
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError as exc:
        raise MalformedMessage(f"string field is not UTF-8: {exc.reason}") from exc


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _read_varint(view: memoryview, position: int, end: int) -> tuple[int, int]:
    if position < end:
        byte: int = view[position]
        if byte < 0x80:
            return byte, position + 1
    value = shift = 0
    while position < end:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _U64, position
        shift += 7
        if shift == 70:
            raise MalformedMessage("varint exceeds 10 bytes")
    raise MalformedMessage("message ends inside a varint")


def _read_length(view: memoryview, position: int, end: int) -> tuple[int, int]:
    length, start = _read_varint(view, position, end)
    if length > end - start:
        raise MalformedMessage("message ends inside a field")
    return start, start + length


def _skip(view: memoryview, position: int, end: int, tag: int) -> int:
    """Position after the unknown field that `tag` opened."""
    groups: list[int] = []
    fields = 0
    while True:
        fields = _counted(fields)
        if tag > 0xFFFFFFFF or tag < 8:
            raise MalformedMessage(f"invalid field tag {tag:#x}")
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _read_varint(view, position, end)
        elif wire_type == _LENGTH:
            _, position = _read_length(view, position, end)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
            if position > end:
                raise MalformedMessage("message ends inside a field")
        elif wire_type == _GROUP_START:
            groups.append(tag >> 3)
        elif wire_type == _GROUP_END:
            if not groups or groups.pop() != tag >> 3:
                raise MalformedMessage("group ends that did not begin")
        else:
            raise MalformedMessage(f"invalid wire type {wire_type}")
        if not groups:
            return position
        tag, position = _read_varint(view, position, end)


def _encode_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + _encode_varint(len(value)) + value


def _text_field(tag: int, value: str) -> bytes:
    return _bytes_field(tag, value.encode()) if value else b""


def _payload_head(tag: int, payload_bytes: int) -> bytes:
    return bytes((tag,)) + _encode_varint(payload_bytes) if payload_bytes else b""
