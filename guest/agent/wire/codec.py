"""Messages in Python and on the wire (proto3 binary encoding; unknown fields are skipped).

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from guest.agent.errors import InvalidArgument
from guest.agent.wire.schema import Field, MessageType, message_type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DEFAULTS: dict[str, Any] = {"s": "", "y": b"", "b": False, "i": 0, "I": 0, "u": 0, "U": 0, "e": 0}
_VARINTS = frozenset("biIuUe")
_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


class DecodeError(InvalidArgument):
    """The bytes are not the message they should be; the text names message and field."""


class Message:
    """Fields are attributes with proto3's defaults. `has` says whether a field was set or received.

    Reading an absent message field gives an empty message that is not stored; a repeated or map field gives a stored,
    mutable container.
    """

    __slots__ = ("_type", "_values")

    def __init__(self, name: str, /, **values: Any) -> None:
        self._type = message_type(name)
        self._values: dict[str, Any] = {}
        for key, value in values.items():
            self._field(key)
            self._values[key] = value

    def _field(self, name: str) -> Field:
        field = self._type.by_name.get(name)
        if field is None:
            raise AttributeError(f"message {self._type.name} has no field {name!r}")
        return field

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        field = self._field(name)
        if field.label == "*":
            return self._values.setdefault(name, [])
        if field.label == "%":
            return self._values.setdefault(name, {})
        if field.kind in _DEFAULTS:
            return _DEFAULTS[field.kind]
        return Message(field.kind)

    def has(self, name: str) -> bool:
        """Whether the field is present; for repeated and map fields, whether it has elements."""
        self._field(name)
        value = self._values.get(name)
        return value is not None and value != [] and value != {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._type is other._type and encode(self) == encode(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self._type.name}({', '.join(f'{key}={value!r}' for key, value in self._values.items())})"


# -- decoding ------------------------------------------------------------------------------------------------------


def decode(name: str, data: bytes) -> Message:
    """The message `name` in `data`. Raises DecodeError, nothing else, whatever the bytes."""
    message = Message(name)
    _merge(message, memoryview(data))
    return message


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK_64, at
        shift += 7
        if shift > 63:
            raise ValueError("varint longer than 10 bytes")


def _bytes(data: memoryview, at: int) -> tuple[memoryview, int]:
    size, at = _varint(data, at)
    end = at + size
    if end > len(data):
        raise IndexError
    return data[at:end], end


def _skip(data: memoryview, at: int, wire: int) -> int:
    if wire == 0:
        return _varint(data, at)[1]
    if wire == 2:
        return _bytes(data, at)[1]
    if wire in (1, 5):
        end = at + (8 if wire == 1 else 4)
        if end > len(data):
            raise IndexError
        return end
    raise ValueError(f"wire type {wire}")


def _merge(message: Message, data: memoryview) -> None:
    kind = message._type
    at, end = 0, len(data)
    field: Field | None = None
    try:
        while at < end:
            field = None
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if number == 0:
                raise ValueError("field number 0")
            field = kind.by_number.get(number)
            if field is None:
                at = _skip(data, at, wire)
            elif wire == 2:
                chunk, at = _bytes(data, at)
                _set_chunk(message, field, chunk)
            elif wire == 0 and field.label != "%" and field.kind in _VARINTS:
                raw, at = _varint(data, at)
                _set_scalar(message, field, _number(field.kind, raw))
            else:
                raise ValueError(f"wire type {wire}")
    except (IndexError, ValueError) as error:
        where = f"{kind.name}.{field.name}" if field is not None else kind.name
        cause = "truncated" if isinstance(error, IndexError) else str(error)
        raise DecodeError(f"decode {where}: {cause}") from None


def _number(kind: str, raw: int) -> int | bool:
    if kind == "U":
        return raw
    if kind == "b":
        return raw != 0
    if kind == "u":
        return raw & _MASK_32
    if kind == "I":
        return raw - (1 << 64) if raw >> 63 else raw
    raw &= _MASK_32
    return raw - (1 << 32) if raw >> 31 else raw


def _set_scalar(message: Message, field: Field, value: Any) -> None:
    if field.label == "*":
        message._values.setdefault(field.name, []).append(value)
    else:
        message._values[field.name] = value


def _set_chunk(message: Message, field: Field, chunk: memoryview) -> None:
    kind = field.kind
    if field.label == "%":
        key, value = _map_entry(field, chunk)
        message._values.setdefault(field.name, {})[key] = value
    elif kind == "s":
        _set_scalar(message, field, str(chunk, "utf-8"))
    elif kind == "y":
        _set_scalar(message, field, bytes(chunk))
    elif kind in _VARINTS:
        if field.label != "*":
            raise ValueError("wire type 2")
        values = message._values.setdefault(field.name, [])
        at = 0
        while at < len(chunk):
            raw, at = _varint(chunk, at)
            values.append(_number(kind, raw))
    elif field.label == "*":
        element = Message(kind)
        _merge(element, chunk)
        message._values.setdefault(field.name, []).append(element)
    else:
        _merge(message._values.setdefault(field.name, Message(kind)), chunk)


def _map_entry(field: Field, chunk: memoryview) -> tuple[str, Any]:
    entry_type = MessageType(f"{field.name} entry", f"key:1:s value:2:{field.kind}")
    entry = Message("Empty")
    entry._type = entry_type
    _merge(entry, chunk)
    return entry.key, entry.value


# -- encoding ------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The message's bytes: fields by number, map entries by key. Defaults are left out unless the field has explicit
    presence.
    """
    out = bytearray()
    _write(message, out)
    return bytes(out)


def _write_varint(value: int, out: bytearray) -> None:
    value &= _MASK_64
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_bytes(number: int, data: bytes | bytearray, out: bytearray) -> None:
    _write_varint(number << 3 | 2, out)
    _write_varint(len(data), out)
    out += data


def _write(message: Message, out: bytearray) -> None:
    for number, field in sorted(message._type.by_number.items()):
        value = message._values.get(field.name)
        if value is None:
            continue
        if field.label == "*":
            _write_repeated(number, field.kind, value, out)
        elif field.label == "%":
            for key, item in sorted(value.items()):
                entry = bytearray()
                _write_value(1, "s", key, entry)
                _write_value(2, field.kind, item, entry)
                _write_bytes(number, entry, out)
        elif field.label == "?" or field.kind not in _DEFAULTS or value != _DEFAULTS[field.kind]:
            _write_value(number, field.kind, value, out)


def _write_repeated(number: int, kind: str, values: list[Any], out: bytearray) -> None:
    if kind in _VARINTS:
        if values:
            packed = bytearray()
            for value in values:
                _write_varint(int(value), packed)
            _write_bytes(number, packed, out)
        return
    for value in values:
        _write_value(number, kind, value, out)


def _write_value(number: int, kind: str, value: Any, out: bytearray) -> None:
    if kind == "s":
        _write_bytes(number, value.encode("utf-8", "replace"), out)
    elif kind == "y":
        _write_bytes(number, value, out)
    elif kind in _VARINTS:
        _write_varint(number << 3, out)
        _write_varint(int(value), out)
    else:
        nested = bytearray()
        _write(value, nested)
        _write_bytes(number, nested, out)
