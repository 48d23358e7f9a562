"""The kinds of values of keys: type, range, unit, and the conversion that checks them; also values as TOML text.

A `Kind` converts both a file's value and an annotation's text. Its methods raise ValueError saying what is wrong with
the value; the caller adds key, file and line.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import json_value
from pyshim.model.units import MIB

MAX_MIB = 1 << 32
MIN_LINK_RATE, MAX_LINK_RATE = 8_000, 8 * 0xFFFFFFFF
"""bit/s. Below, one frame of a large MTU would take minutes; above is more than the kernel's token bucket counts."""
_MAX_VCPUS = 4096
ALL_VCPUS = Fraction(-1)
"""As many vCPUs as the host has CPUs. Any negative number means that in Kata's Go runtime."""
_TOO_LONG = 10**20
_DECIMAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?")
_HTTP_URL = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?(/[A-Za-z0-9/._~%-]{0,1000})?"
)
_EXTENSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,10}")
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
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
# The texts of Go's strconv.ParseBool, which Kata's annotations use.
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})


class WithoutEffect(ValueError):
    """A value that is ignored with a warning, which is the error's text: Kata had it once."""


class UnusableNumber(msgspec.Struct, frozen=True):
    """A TOML float that is refused: NaN, an infinity, 1e400. It is stored so that the error can name its key."""

    text: str


class Kind(msgspec.Struct, frozen=True):
    type_name: str
    from_toml: Callable[[Any], Any]
    from_text: Callable[[str], Any]
    """Converts an annotation's text to a value of TOML's types, which `from_toml` then checks."""
    allowed: str = ""
    """The range or the choices, for people; empty if the type says enough."""
    unit: str = ""
    suffix: str = ""
    """The unit to add to the key's name in the name of its field."""
    refused: tuple[str, ...] = ()
    """Values of Kata's runtimes that pyshim does not support: no sandbox starts with one."""
    most: int | None = None
    """A greater value counts as this one, with a warning, as in Kata."""

    def convert(self, value: Any) -> Any:
        if isinstance(value, UnusableNumber):
            raise ValueError(f"{value.text} is not a usable number")
        return self.from_toml(value)

    def convert_text(self, text: str) -> Any:
        return self.from_toml(self.from_text(text))


def exact_number(text: str) -> Fraction | UnusableNumber:
    """The exact value of a TOML float's decimal text."""
    plain = text.replace("_", "")
    return Fraction(plain) if _DECIMAL.fullmatch(plain) else UnusableNumber(text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    if "\0" in value:
        raise ValueError("contains a NUL character")
    return value


def _http_url(value: Any) -> str:
    text = _text(value)
    if not _HTTP_URL.fullmatch(text):
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT, without user, query and fragment")
    return text


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _boolean_text(text: str) -> bool:
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"expected true or false, not {text[:100]!r}")


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("expected a list of strings")
    return tuple(map(_text, value))


def _words_text(text: str) -> list[Any]:
    """A JSON list, as in Kata's Go runtime, or words with commas between, as in its Rust runtime."""
    if not text.lstrip().startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    value = json_value(text, lambda problem: ValueError(f"expected a JSON list of strings: {problem}"))
    return value if isinstance(value, list) else []


def _modules_text(text: str) -> list[Any]:
    return [module.strip() for module in text.split(";") if module.strip()]


def _patterns(value: Any) -> tuple[str, ...]:
    for pattern in _words(value):
        if pattern.isidentifier():
            continue  # Most patterns are plain names; to compile them takes as long as to read the whole file.
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


def _shown(value: int | Fraction) -> str:
    """The number for a message, short even if it has thousands of digits."""
    if not -_TOO_LONG < value < _TOO_LONG:
        return "a number of more than 20 digits"
    return str(value) if isinstance(value, int) else f"{float(value):g}"


def _vcpus(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise ValueError("expected a number")
    if not 0 <= value <= _MAX_VCPUS:
        raise ValueError(f"{_shown(value)} is not between 0 and {_MAX_VCPUS}")
    return Fraction(value)


def _vcpus_or_all(value: Any) -> Fraction:
    is_number = isinstance(value, int | Fraction) and not isinstance(value, bool)
    return ALL_VCPUS if is_number and value < 0 else _vcpus(value)


def _vcpus_text(text: str) -> Fraction:
    """Never negative: a pod names the CPUs that it asks for."""
    return _vcpus(_number(text))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise ValueError("expected a number")
    if not Fraction(1, 1000) <= value <= 86_400:
        raise ValueError(f"{_shown(value)} is not between 0.001 and 86400")
    return float(value)


def _whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("expected a whole number")
        if not minimum <= value <= maximum:
            raise ValueError(f"{_shown(value)} is not between {minimum} and {maximum}")
        return value

    return convert


def _size_text(text: str) -> int:
    """The MiB of a plain number, or of a number with a unit ("2 GiB"), rounded up."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] and match[2].lower() not in _UNIT_BYTES):
        raise ValueError(f'expected MiB, or a number with a unit such as "2 GiB", not {text[:100]!r}')
    if not match[2]:
        return _whole(0, MAX_MIB)(_number(match[1]))
    return math.ceil(Fraction(match[1]) * _UNIT_BYTES[match[2].lower()] / MIB)


def _link_rate(value: Any) -> int:
    rate = _whole(0, MAX_LINK_RATE)(value)
    if 0 < rate < MIN_LINK_RATE:
        raise ValueError(f"{rate} is neither 0 nor between {MIN_LINK_RATE} and {MAX_LINK_RATE}")
    return rate


def _sector_size(value: Any) -> int:
    size = _whole(0, 65536)(value)
    if size and (size < 512 or size & (size - 1)):
        raise ValueError(f"{_shown(size)} is neither 0 nor a power of two between 512 and 65536")
    return size


def whole(minimum: int, maximum: int, unit: str = "", suffix: str = "") -> Kind:
    return Kind(
        "whole number", _whole(minimum, maximum), _number, allowed=f"{minimum} to {maximum}", unit=unit, suffix=suffix
    )


def limited(most: int) -> Kind:
    """A whole number from 0. One above `most` counts as `most`."""
    allowed = f"0 to {most}; more counts as {most}"
    return Kind("whole number", _whole(0, (1 << 32) - 1), _number, allowed=allowed, most=most)


def memory(minimum: int) -> Kind:
    """MiB; in an annotation also a number with a unit."""
    allowed = f"{minimum} to {MAX_MIB}"
    return Kind("whole number", _whole(minimum, MAX_MIB), _size_text, allowed=allowed, unit="MiB", suffix="_mib")


def choice(*values: str, refused: tuple[str, ...] = ()) -> Kind:
    """One of `values`, or one of `refused`: `convert` accepts those, and `Key.verdict_of` refuses them."""
    listed = ", ".join(f'"{value}"' for value in values)

    def convert(value: Any) -> str:
        if _text(value) not in (*values, *refused):
            raise ValueError(f"{value[:100]!r} is not one of {listed}")
        return str(value)

    allowed = listed + ("; refused: " + ", ".join(f'"{value}"' for value in refused) if refused else "")
    return Kind("string", convert, str, allowed=allowed, refused=refused)


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

    return Kind("list of tables", convert, _words_text, allowed=f"each with {', '.join(required)}")


def _extensions(value: Any) -> tuple[dict[str, str], ...]:
    """The images that extend the guest's. Names are short: a disk's serial number contains one and has 20 bytes."""
    images: tuple[dict[str, str], ...] = tables("name", "path").from_toml(value)
    names = [image["name"] for image in images]
    for image in images:
        name = image["name"]
        if not _EXTENSION_NAME.fullmatch(name):
            raise ValueError(f"name {name[:100]!r} is not 1 to 10 letters, digits, '-' and '_'")
        if names.count(name) > 1:
            raise ValueError(f"name {name!r} is given twice")
        if not image["path"].startswith("/"):
            raise ValueError(f"path {image['path'][:100]!r} of {name!r} is not absolute")
        for key in image:
            if key not in ("name", "path", "verity_params"):
                raise ValueError(f"{key[:100]!r} of {name!r} is not one of name, path, verity_params")
        if not isinstance(image.get("verity_params", ""), str):
            raise ValueError(f"verity_params of {name!r}: expected a string")
    return images


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


TEXT = Kind("string", _text, str)
HTTP_URL = Kind("URL", _http_url, str, allowed="http://HOST:PORT or https://HOST:PORT, with a path or without")
BASE64_TEXT = Kind("string", _text, _text_of_base64, allowed="base64 of it in an annotation")
PATH = Kind("path", _text, str)
BOOL = Kind("boolean", _boolean, _boolean_text)
WORDS = Kind("list of strings", _words, _words_text)
MODULES = Kind("list of strings", _words, _modules_text, allowed='"module parameter=value ..."')
PATTERNS = Kind("list of regular expressions", _patterns, _words_text)
GLOBS = Kind("list of path patterns", _words, _words_text)
VCPUS = Kind("number", _vcpus, _number, allowed=f"0 to {_MAX_VCPUS}, fractions are exact", unit="vCPU")
BASE_VCPUS = replace(
    VCPUS,
    from_toml=_vcpus_or_all,
    from_text=_vcpus_text,
    allowed=f"{VCPUS.allowed}; negative, in a file: all of the host's",
)
SECONDS = Kind("number", _seconds, _number, allowed="0.001 to 86400", unit="s", suffix="_s")
MILLISECONDS = Kind(
    "whole number", lambda value: _whole(1, 86_400_000)(value) / 1000, _number, allowed="1 to 86400000", unit="ms"
)
"""Converts to seconds."""
LINK_RATE = Kind("whole number", _link_rate, _number, allowed=f"0, or {MIN_LINK_RATE} to {MAX_LINK_RATE}", unit="bit/s")
SECTOR_SIZE = Kind("whole number", _sector_size, _number, allowed="0, or a power of two from 512 to 65536", unit="byte")
EXTENSIONS = Kind("list of tables", _extensions, _no_text, allowed="each with name, path and optional verity_params")
TABLE = Kind("table", _table, _no_text)


def toml_value(value: Any) -> str:
    """`value` as TOML on one line. A fraction is written as a decimal, a whole number of seconds without a point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML. TOML also forbids a bare DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Fraction | float):
        return str(int(value)) if value == int(value) else _decimal(Fraction(value))
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def _decimal(value: Fraction) -> str:
    """The exact decimal: values come from decimal texts, so that a power of ten makes them whole."""
    digits = next(count for count in range(100) if (value * 10**count).denominator == 1)
    text = str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"
