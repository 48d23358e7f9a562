"""What a key may hold: type, range and unit, and the conversion that checks them.

The same `Kind` converts a value of a file and the text of an annotation. `convert` raises ValueError saying what is
wrong with the value; whoever calls it knows key, file and line.
"""

import base64
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from pyshim.model.dataclasses import dataclass

MAX_MIB = 1 << 32
_MAX_VCPUS = 4096
_DECIMAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?")
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
_MIB = 1 << 20
_UNIT_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    name: 1 << shift
    for shift, names in (
        (10, ("k", "ki", "kib")),
        (20, ("m", "mi", "mib")),
        (30, ("g", "gi", "gib")),
        (40, ("ti", "tib")),
    )
    for name in names
}
# What Go's strconv.ParseBool takes: the annotations of existing pods are written for it.
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})


@dataclass(frozen=True, slots=True)
class UnusableNumber:
    """A TOML float no number here can be: NaN, an infinity, 1e400. Kept until the key that holds it is known."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    type_name: str
    allowed: str
    """Range or choices, for people; empty when the type says it all."""
    unit: str
    suffix: str
    """What a field's name adds to the key's, so that it carries its unit."""
    from_toml: Callable[[Any], Any]
    from_text: Callable[[str], Any]
    """The TOML-like value an annotation's text stands for; `from_toml` then checks it."""

    def convert(self, value: Any) -> Any:
        if isinstance(value, UnusableNumber):
            raise ValueError(f"{value.text} is not a usable number")
        return self.from_toml(value)

    def convert_text(self, text: str) -> Any:
        return self.from_toml(self.from_text(text))


def exact_number(text: str) -> Fraction | UnusableNumber:
    """A TOML float as the fraction its decimal text is, never a binary float."""
    plain = text.replace("_", "")
    return Fraction(plain) if _DECIMAL.fullmatch(plain) else UnusableNumber(text)


def _kind(
    type_name: str,
    from_toml: Callable[[Any], Any],
    from_text: Callable[[str], Any],
    *,
    allowed: str = "",
    unit: str = "",
    suffix: str = "",
) -> Kind:
    return Kind(
        type_name=type_name, allowed=allowed, unit=unit, suffix=suffix, from_toml=from_toml, from_text=from_text
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    if "\0" in value:
        raise ValueError("contains a NUL character")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _boolean_text(text: str) -> bool:
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"expected true or false, not {text[:100]!r}")


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("expected a list of strings")
    return tuple(_item(item) for item in value)


def _item(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a list of strings")
    return _text(value)


def _words_text(text: str) -> list[Any]:
    """A JSON list, as the Go runtime reads it, or a comma list, as the Rust one does."""
    if not text.lstrip().startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"expected a JSON list of strings: {exc}") from exc
    return value if isinstance(value, list) else []


def _modules_text(text: str) -> list[Any]:
    return [module.strip() for module in text.split(";") if module.strip()]


def _patterns(value: Any) -> tuple[str, ...]:
    for pattern in _words(value):
        if pattern.isidentifier():
            continue  # as most are, and to compile them all would take as long as to read the file
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as exc:
            raise ValueError(f"{pattern[:100]!r} is not a regular expression: {exc}") from exc
    return _words(value)


def _number(text: str) -> Fraction | int:
    number = exact_number(text.strip())
    if isinstance(number, UnusableNumber):
        raise ValueError(f"expected a number, not {text[:100]!r}")
    return int(number) if number.denominator == 1 else number


def _vcpus(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise ValueError("expected a number")
    if not 0 <= value <= _MAX_VCPUS:
        raise ValueError(f"{float(value):g} is not between 0 and {_MAX_VCPUS}")
    return Fraction(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise ValueError("expected a number")
    if not Fraction(1, 1000) <= value <= 86_400:
        raise ValueError(f"{float(value):g} is not between 0.001 and 86400")
    return float(value)


def _whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("expected a whole number")
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not between {minimum} and {maximum}")
        return value

    return convert


def _size_text(text: str) -> int:
    """MiB: a plain number is MiB already, one with a unit ("2 GiB") is converted, a part of a MiB counts as one."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] and match[2].lower() not in _UNIT_BYTES):
        raise ValueError(f'expected MiB, or a number with a unit such as "2 GiB", not {text[:100]!r}')
    if not match[2]:
        return _whole(0, MAX_MIB)(_number(match[1]))
    return math.ceil(Fraction(match[1]) * _UNIT_BYTES[match[2].lower()] / _MIB)


def _sector_size(value: Any) -> int:
    size = _whole(0, 65536)(value)
    if size and (size < 512 or size & (size - 1)):
        raise ValueError(f"{size} is neither 0 nor a power of two between 512 and 65536")
    return size


def whole(minimum: int, maximum: int, unit: str = "", suffix: str = "") -> Kind:
    return _kind(
        "whole number", _whole(minimum, maximum), _number, allowed=f"{minimum} to {maximum}", unit=unit, suffix=suffix
    )


def memory(minimum: int) -> Kind:
    """MiB; an annotation may name a unit."""
    allowed = f"{minimum} to {MAX_MIB}"
    return _kind("whole number", _whole(minimum, MAX_MIB), _size_text, allowed=allowed, unit="MiB", suffix="_mib")


def choice(*values: str) -> Kind:
    listed = ", ".join(f'"{value}"' for value in values)

    def convert(value: Any) -> str:
        if _text(value) not in values:
            raise ValueError(f"{value[:100]!r} is not one of {listed}")
        return str(value)

    return _kind("string", convert, str, allowed=listed)


def tables(*required: str) -> Kind:
    """A list of tables that have at least the keys `required`, all strings."""

    def convert(value: Any) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("expected a list of tables")
        for item in value:
            missing = [name for name in required if not isinstance(item.get(name), str)]
            if missing:
                raise ValueError(f"a table of the list lacks the string {missing[0]!r}")
        return tuple(value)

    return _kind("list of tables", convert, _words_text, allowed=f"each with {', '.join(required)}")


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a table")
    return value


def _text_of_base64(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError as exc:  # both the alphabet's and UTF-8's errors
        raise ValueError(f"expected base64 of a text: {exc}") from exc


def _no_text(text: str) -> Any:
    raise ValueError("cannot be given as text")


TEXT = _kind("string", _text, str)
BASE64_TEXT = _kind("string", _text, _text_of_base64, allowed="base64 of it in an annotation")
PATH = _kind("path", _text, str)
BOOL = _kind("boolean", _boolean, _boolean_text)
WORDS = _kind("list of strings", _words, _words_text)
MODULES = _kind("list of strings", _words, _modules_text, allowed='"module parameter=value ..."')
PATTERNS = _kind("list of regular expressions", _patterns, _words_text)
GLOBS = _kind("list of path patterns", _words, _words_text)
VCPUS = _kind("number", _vcpus, _number, allowed=f"0 to {_MAX_VCPUS}, fractions are exact", unit="vCPU")
SECONDS = _kind("number", _seconds, _number, allowed="0.001 to 86400", unit="s", suffix="_s")
MILLISECONDS = _kind(
    "whole number", lambda value: _whole(1, 86_400_000)(value) / 1000, _number, allowed="1 to 86400000", unit="ms"
)
"""Held in seconds, like SECONDS."""
SECTOR_SIZE = _kind(
    "whole number", _sector_size, _number, allowed="0, or a power of two from 512 to 65536", unit="byte"
)
TABLE = _kind("table", _table, _no_text)
