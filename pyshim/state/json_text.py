"""JSON text of documents that are written again and again, of which hardly anything has changed since the last time."""

import json
from collections.abc import Mapping
from typing import NamedTuple

_NO_PARTS: Mapping[object, "Encoded"] = {}


class Encoded(NamedTuple):
    """A value and its text; `parts` are the same of its members, by key or index, as deep as they are kept."""

    value: object
    text: str
    parts: Mapping[object, "Encoded"]


def encode(value: object) -> str:
    return _ENCODER.encode(value)


def encode_again(value: object, before: Encoded | None, depth: int) -> Encoded:
    """`value` with its text; the text of whatever equals what it was before is taken from there.

    Looks for such members down to `depth`. Values are not to be changed afterwards, nor the type of a number.
    """
    if before is not None and before.value == value:
        return before
    former = _NO_PARTS if before is None else before.parts
    if depth and isinstance(value, dict):
        parts = {key: encode_again(item, former.get(key), depth - 1) for key, item in value.items()}
        text = ",".join([f"{encode(key)}:{part.text}" for key, part in parts.items()])
        return Encoded(value, f"{{{text}}}", parts)
    if depth and isinstance(value, list):
        items = [encode_again(item, former.get(index), depth - 1) for index, item in enumerate(value)]
        return Encoded(value, f"[{','.join([item.text for item in items])}]", dict(enumerate(items)))
    return Encoded(value, encode(value), _NO_PARTS)


_ENCODER = json.JSONEncoder(separators=(",", ":"))
