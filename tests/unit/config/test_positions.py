"""Lines of keys: by table, and against tomllib for generated documents."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.config.positions import key_lines
from pyshim.config.values import toml_value

TEXTS = [
    ("nothing", "", {}),
    ("top", "\n\na = 1", {("a",): 3}),
    ("table", "[x]\na = 1\n[y.z]\nb = 2", {("x",): 1, ("x", "a"): 2, ("y",): 3, ("y", "z"): 3, ("y", "z", "b"): 4}),
    ("dotted key", "a.b . c = 1\na.d = 2", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1, ("a", "d"): 2}),
    ("quoted keys", "'a.b' = 1\n\"c\\u0064\" = 2", {("a.b",): 1, ("cd",): 2}),
    ("comments", "# [no]\na = 1 # b = 2\n#\nc = '#' # d", {("a",): 2, ("c",): 4}),
    ("list over lines", "a = [\n 1, # ]\n '[', \"]\",\n [2],\n]\nb = 1", {("a",): 1, ("b",): 6}),
    ("long string", 'a = """\nb = 1\n\\""" c = 2\n"""\nd = 1', {("a",): 1, ("d",): 5}),
    ("long string that ends in quotes", 'a = """b"""""\nc = 1', {("a",): 1, ("c",): 2}),
    ("long literal", "a = '''\nb = 1\n'' c\n'''\nd = 1", {("a",): 1, ("d",): 5}),
    ("empty strings", "a = \"\"\nb = ''\nc = 1", {("a",): 1, ("b",): 2, ("c",): 3}),
    (
        "inline table",
        "a = { b = 1, c.d = '}' }\ne = 1",
        {("a",): 1, ("a", "b"): 1, ("a", "c"): 1, ("a", "c", "d"): 1, ("e",): 2},
    ),
    ("empty inline table", "a = {}\nb = 1", {("a",): 1, ("b",): 2}),
    (
        "array of tables",
        "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3",
        {("a",): 1, ("a", "b"): 2, ("a", "c"): 5, ("a", "c", "d"): 6},
    ),
    ("windows", "a = 1\r\n[b]\r\nc = 2", {("a",): 1, ("b",): 2, ("b", "c"): 3}),
    ("dates and spaces", "a = 1979-05-27 07:32:00 # x\nb = 1", {("a",): 1, ("b",): 2}),
    ("too many lines that may end it", "a = 1\nb = [\n" + "[1],\n" * 200 + "]\nc = 1", {("a",): 1}),
    ("blanks in a header", "[ a . 'b' ]\nc = 1", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 2}),
]


@pytest.mark.parametrize(("_", "text", "lines"), TEXTS, ids=[row[0] for row in TEXTS])
def test_every_key_and_table_has_its_line(_: str, text: str, lines: dict[tuple[str, ...], int]) -> None:
    tomllib.loads(text)

    assert key_lines(text) == lines


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=6)
_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(), st.integers(-99, 99), st.text(max_size=12), st.lists(st.text(max_size=4), max_size=3)
)
_DOCUMENTS = st.dictionaries(
    _NAMES, st.dictionaries(_NAMES, _LEAVES | st.dictionaries(_NAMES, _LEAVES, max_size=2), max_size=4), max_size=4
)


@given(_DOCUMENTS)
def test_generated_documents_are_read_as_tomllib_reads_them(document: dict[str, dict[str, Any]]) -> None:
    lines = []
    expected: dict[tuple[str, ...], int] = {}
    for table, pairs in document.items():
        lines.append(f"[{toml_value(table)}]")
        expected[table,] = len(lines)
        for key, value in pairs.items():
            lines.append(f"{toml_value(key)} = {toml_value(value)}")
            expected[table, key] = len(lines)
            if isinstance(value, dict):
                expected.update({(table, key, inner): len(lines) for inner in value})
    text = "\n".join(lines)

    assert tomllib.loads(text) == document
    assert key_lines(text) == expected
