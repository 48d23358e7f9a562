"""Each kind of value takes its range, from a file and from an annotation, and refuses the rest by name."""

import re
from fractions import Fraction
from typing import Any

import pytest

from pyshim.config import values
from pyshim.config.values import Kind, UnusableNumber, exact_number

FROM_FILE = [
    ("text", values.TEXT, "a b", "a b"),
    ("boolean", values.BOOL, True, True),
    ("list", values.WORDS, ["a", "b"], ("a", "b")),
    ("empty list", values.WORDS, [], ()),
    ("patterns", values.PATTERNS, [".*", "^a$"], (".*", "^a$")),
    ("vcpus whole", values.VCPUS, 2, Fraction(2)),
    ("vcpus fraction", values.VCPUS, Fraction(1, 10), Fraction(1, 10)),
    ("memory", values.memory(64), 64, 64),
    ("seconds", values.SECONDS, 45, 45.0),
    ("a part of a second", values.SECONDS, Fraction(3, 2), 1.5),
    ("milliseconds are held in seconds", values.MILLISECONDS, 1500, 1.5),
    ("no sector size", values.SECTOR_SIZE, 0, 0),
    ("sector size", values.SECTOR_SIZE, 4096, 4096),
    ("no rate", values.LINK_RATE, 0, 0),
    ("least rate", values.LINK_RATE, values.MIN_LINK_RATE, values.MIN_LINK_RATE),
    ("greatest rate", values.LINK_RATE, values.MAX_LINK_RATE, values.MAX_LINK_RATE),
    ("choice", values.choice("a", "b"), "b", "b"),
    ("tables", values.tables("name"), [{"name": "x"}], ({"name": "x"},)),
]

NOT_FROM_FILE = [
    ("number as text", values.TEXT, 3, "expected a string"),
    ("url without scheme", values.HTTP_URL, "localhost:4318", "expected http://"),
    ("url of another scheme", values.HTTP_URL, "grpc://localhost:4317", "expected http://"),
    ("url with a password", values.HTTP_URL, "http://a:b@localhost:4318", "without user"),
    ("url with a query", values.HTTP_URL, "http://localhost:4318/?a=b", "query"),
    ("url with a line end", values.HTTP_URL, "http://localhost:4318/\r\nX: y", "expected http://"),
    ("nul", values.TEXT, "a\0b", "NUL"),
    ("text as boolean", values.BOOL, "true", "true or false"),
    ("one as boolean", values.BOOL, 1, "true or false"),
    ("text as list", values.WORDS, "a b", "list of strings"),
    ("number in list", values.WORDS, ["a", 1], "list of strings"),
    ("pattern that does not compile", values.PATTERNS, ["a", "(unclosed"], "'(unclosed' is not a regular expression"),
    ("negative vcpus", values.VCPUS, -1, "-1 is not between 0 and 4096"),
    ("boolean vcpus", values.VCPUS, True, "expected a number"),
    ("text vcpus", values.VCPUS, "2", "expected a number"),
    ("nan", values.VCPUS, UnusableNumber("nan"), "nan is not a usable number"),
    ("infinity", values.VCPUS, UnusableNumber("-inf"), "-inf is not a usable number"),
    ("1e400", values.memory(0), UnusableNumber("1e400"), "1e400 is not a usable number"),
    ("memory with unit", values.memory(0), "2 GiB", "expected a whole number"),
    ("memory with fraction", values.memory(0), Fraction(5, 2), "expected a whole number"),
    ("memory below the least", values.memory(64), 63, "63 is not between 64 and"),
    ("negative memory", values.memory(0), -5, "-5 is not between 0 and"),
    ("no seconds", values.SECONDS, 0, "0 is not between 0.001 and 86400"),
    ("odd sector size", values.SECTOR_SIZE, 1000, "1000 is neither 0 nor a power of two"),
    ("small rate", values.LINK_RATE, 7_999, "7999 is neither 0 nor between 8000 and 34359738360"),
    ("large rate", values.LINK_RATE, values.MAX_LINK_RATE + 1, "34359738361 is not between 0 and 34359738360"),
    ("small sector size", values.SECTOR_SIZE, 256, "256 is neither 0 nor a power of two"),
    ("no choice", values.choice("a", "b"), "c", '\'c\' is not one of "a", "b"'),
    ("table that lacks a key", values.tables("name", "path"), [{"name": "x"}], "lacks the string 'path'"),
    ("text as tables", values.tables("name"), "x", "list of tables"),
    ("text as table", values.TABLE, "x", "expected a table"),
]

FROM_ANNOTATION = [
    ("text", values.TEXT, " a ", " a "),
    ("true as Go has it", values.BOOL, "T", True),
    ("one", values.BOOL, "1", True),
    ("false", values.BOOL, "False", False),
    ("whole number", values.whole(0, 9), "7", 7),
    ("number with a whole fraction", values.whole(0, 9), "7.0", 7),
    ("vcpus", values.VCPUS, "0.1", Fraction(1, 10)),
    ("memory in MiB", values.memory(64), "2048", 2048),
    ("memory with unit", values.memory(64), "2 GiB", 2048),
    ("memory as Kubernetes writes it", values.memory(64), "1.5Gi", 1536),
    ("a part of a MiB is a whole one", values.memory(64), "100000001B", 96),
    ("decimal unit", values.memory(64), "1GB", 954),
    ("JSON list", values.WORDS, '["-o", "a,b"]', ("-o", "a,b")),
    ("comma list", values.WORDS, "--a=1, --b", ("--a=1", "--b")),
    ("modules", values.MODULES, "e1000e A=3,3 B=1; i915", ("e1000e A=3,3 B=1", "i915")),
    ("milliseconds", values.MILLISECONDS, "250", 0.25),
]

NOT_FROM_ANNOTATION = [
    ("yes", values.BOOL, "yes", "expected true or false, not 'yes'"),
    ("empty boolean", values.BOOL, "", "expected true or false"),
    ("no number", values.VCPUS, "two", "expected a number, not 'two'"),
    ("nan", values.VCPUS, "nan", "expected a number, not 'nan'"),
    ("1e400", values.VCPUS, "1e400", "expected a number, not '1e400'"),
    ("hexadecimal", values.whole(0, 99), "0x10", "expected a number"),
    ("empty number", values.whole(0, 99), "", "expected a number"),
    ("negative", values.VCPUS, "-0.5", "-0.5 is not between"),
    ("fraction of a MiB without unit", values.memory(0), "2.5", "expected a whole number"),
    ("unknown unit", values.memory(0), "2 parsecs", "with a unit"),
    ("negative memory", values.memory(0), "-2 GiB", "with a unit"),
    ("below the least", values.memory(64), "1 MiB", "1 is not between 64 and"),
    ("broken JSON", values.WORDS, '["a"', "expected a JSON list"),
    ("numbers in JSON", values.WORDS, "[1]", "list of strings"),
    ("a table", values.TABLE, "{}", "cannot be given as text"),
]


def ids(rows: list[Any]) -> list[str]:
    return [row[0] for row in rows]


@pytest.mark.parametrize(("_", "kind", "raw", "value"), FROM_FILE, ids=ids(FROM_FILE))
def test_a_files_value_is_taken(_: str, kind: Kind, raw: Any, value: Any) -> None:
    assert kind.convert(raw) == value
    assert type(kind.convert(raw)) is type(value)


@pytest.mark.parametrize(("_", "kind", "raw", "reason"), NOT_FROM_FILE, ids=ids(NOT_FROM_FILE))
def test_a_files_value_is_refused_with_the_reason(_: str, kind: Kind, raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        kind.convert(raw)


@pytest.mark.parametrize(("_", "kind", "text", "value"), FROM_ANNOTATION, ids=ids(FROM_ANNOTATION))
def test_an_annotations_text_is_taken(_: str, kind: Kind, text: str, value: Any) -> None:
    assert kind.convert_text(text) == value


@pytest.mark.parametrize(("_", "kind", "text", "reason"), NOT_FROM_ANNOTATION, ids=ids(NOT_FROM_ANNOTATION))
def test_an_annotations_text_is_refused_with_the_reason(_: str, kind: Kind, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        kind.convert_text(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.1", Fraction(1, 10)),
        ("1_000.5", Fraction(2001, 2)),
        ("2e3", Fraction(2000)),
        ("-0.0", Fraction(0)),
        ("1e400", UnusableNumber("1e400")),
        ("inf", UnusableNumber("inf")),
        ("+nan", UnusableNumber("+nan")),
        ("0." + "1" * 50, UnusableNumber("0." + "1" * 50)),
    ],
)
def test_a_toml_float_is_the_fraction_its_text_is_or_unusable(text: str, number: object) -> None:
    assert exact_number(text) == number
