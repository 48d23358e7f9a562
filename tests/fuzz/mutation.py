"""Inputs made from a corpus: pieces are cut out, repeated, moved between inputs, or replaced by odd words."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

MAX_BYTES = 256 << 10
_MAX_EDITS = 8
_PIECE_BYTES = (1, 4, 16, 64, 1024)
_TIMES = (2, 2, 3, 40, 40, 2000)
_SIGNS = '" \' { } [ ] , : = . # \\ / - % & * " """ \'\'\''.split()
_NUMBERS = "0 1 -1 255 4294967295 4294967296 9223372036854775808 1e400 -0.0 NaN 1_0".split()
_NAMES = 'null true false None "" {} [] \\ud800 é __proto__ ../ // !!int &a *a'.split()
_ODD = ("\n", " ", "\0", "\r\n", "\ud800", "\ufeff", "<<: ", "--- ", "x" * 300, "9" * 30, "9" * 5000)
_WORDS = (
    *(text.encode("utf-8", "surrogatepass") for text in (*_SIGNS, *_NUMBERS, *_NAMES, *_ODD)),
    *(b"\xff", b"\x80", b"\x0a\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf")),
    *("", "0", "-1", "a", "/", "..", "a/../b", "\0", "\ud800", "é", "x" * 5000, "1e999999", "1/0", "a=b", "a,b", "%s"),
    *([], {}, [None], [""], {"": None}, [[]], [{}]),
)
_VALUES_AS_NAMES = ("", "x", "\ud800", "__proto__", "é", "Version")


def mutated(corpus: Sequence[bytes], random: Random) -> bytes:
    """One input of `corpus` with up to eight edits: of its bytes, or of the values of a JSON document."""
    if random.randrange(2):
        with suppress(ValueError, RecursionError):
            document = json.loads(random.choice(corpus))
            for _ in range(random.randint(1, _MAX_EDITS)):
                document = _with_edit(document, random)
            return json.dumps(document).encode()[:MAX_BYTES]
    return _with_edited_bytes(random.choice(corpus), corpus, random)


def _with_edit(value: Any, random: Random) -> Any:
    """`value` with one value in it, or itself, replaced, removed, renamed, or wrapped."""
    if isinstance(value, dict | list) and value and random.randrange(8):
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        match random.randrange(12):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[random.choice(_VALUES_AS_NAMES)] = value.pop(key)
            case 2 if isinstance(value, list):
                value.append(deepcopy(value[key]))
            case _:
                value[key] = _with_edit(value[key], random)
        return value
    return [value] if not random.randrange(20) else deepcopy(random.choice(_VALUES))


def _with_edited_bytes(source: bytes, corpus: Sequence[bytes], random: Random) -> bytes:
    data = bytearray(source)
    for _ in range(random.randint(1, _MAX_EDITS)):
        start = random.randint(0, len(data))
        end = min(len(data), start + random.randint(0, random.choice(_PIECE_BYTES)))
        match random.randrange(7):
            case 0:
                del data[start:end]
            case 1:
                data[start:start] = random.choice(_WORDS)
            case 2:
                data[start:end] = random.choice(_WORDS)
            case 3:
                data[start:end] = data[start:end] * random.choice(_TIMES)
            case 4:
                other = random.choice(corpus)
                begin = random.randint(0, len(other))
                data[start:end] = other[begin : begin + random.choice(_PIECE_BYTES)]
            case 5 if start < len(data):
                data[start] ^= 1 << random.randrange(8)
            case _:
                data[start:end] = random.randbytes(random.randint(0, 8))
    return bytes(data[:MAX_BYTES])


def smallest(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """`data` without any piece that it also fails without; `fails(data)` is true."""
    piece = len(data)
    while piece := piece // 2:
        start = 0
        while start < len(data):
            shorter = data[:start] + data[start + piece :]
            if fails(shorter):
                data = shorter
            else:
                start += piece
    return data
