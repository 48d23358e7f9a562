"""The part of protobuf's wire format that `start` and `-info` need: the protobuf library takes longer than both.

A message is a list of (field number, value): an int travels as a varint, bytes and str as a length-delimited field.
Source: protobuf.dev/programming-guides/encoding.
"""

Value = int | bytes | str

_VARINT, _FIXED64, _BYTES, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_MAX_FIELD = (1 << 29) - 1


class WireError(ValueError):
    """The bytes are not a protobuf message."""


def encode(*fields: tuple[int, Value]) -> bytes:
    """The message of `fields`, in their order; zero and empty values are left out, as proto3 has it.

    A negative int is written as int32 and int64 are: two's complement in 64 bits.
    """
    out = bytearray()
    for number, value in fields:
        if not value:
            continue
        if isinstance(value, int):
            out += _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)
            continue
        data = value.encode() if isinstance(value, str) else value
        out += _varint(number << 3 | _BYTES) + _varint(len(data)) + data
    return bytes(out)


def decode(data: bytes) -> "list[tuple[int, int | bytes]]":
    """Every field of the message, in wire order, repeats and unknown ones included; raises WireError.

    Varints come as unsigned ints (see `signed`), fixed-width fields as their bytes. Groups are refused: none of our
    messages ever had one, and refusing them recognizes foreign bytes sooner.
    """
    fields: list[tuple[int, int | bytes]] = []
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        if not 0 < number <= _MAX_FIELD:
            raise WireError(f"field number {number} at byte {position} is not valid")
        if kind == _VARINT:
            value, position = _read_varint(data, position)
            fields.append((number, value))
            continue
        if kind == _BYTES:
            length, position = _read_varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"wire type {kind} of field {number} is not used")
        if position + length > len(data):
            raise WireError(f"field {number} ends {position + length - len(data)} bytes past the message")
        fields.append((number, data[position : position + length]))
        position += length
    return fields


def signed(value: int) -> int:
    """The int32 or int64 that the unsigned varint `value` stands for."""
    return value - (1 << 64) if value >> 63 else value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(position, min(position + 10, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, index + 1
        shift += 7
    raise WireError(f"varint at byte {position} does not end")
