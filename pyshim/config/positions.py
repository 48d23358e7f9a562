"""Finds the line of each key and table in a TOML text, which `tomllib` does not report.

A table header, or a key with its value, is a valid TOML text. So the text is parsed again, statement by statement.
"""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
_ENDS = ("]", '"""', "'''")
"""A line without any of these cannot be the last of a value of several lines."""
_MAX_FAILURES = 100
"""The most failed attempts to parse a statement. Each attempt parses all lines of the statement so far."""


def key_lines(text: str) -> dict[Path, int]:
    """The line number, from 1, of every key and table of a valid TOML text.

    All items of an array of tables have the array's path. After `_MAX_FAILURES` the remaining keys are left out.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    for line, is_header, document in _statements(text):
        above = () if is_header else table
        for path in _paths(document, above):
            lines.setdefault(path, line)
            table = path if is_header else table
    return lines


def _statements(text: str) -> Iterator[tuple[int, bool, Mapping[str, Any]]]:
    """For each statement: its first line, whether it is a table header, and the document that it describes."""
    statement, first, failures = "", 0, 0
    for number, line in enumerate(text.split("\n"), start=1):
        first = first or number
        statement += f"{line}\n"
        if number != first and not any(end in line for end in _ENDS):
            continue
        try:
            document = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            failures += 1
            if failures > _MAX_FAILURES:
                return
            continue
        if document:
            yield first, statement.lstrip().startswith("["), document
        statement, first = "", 0


def _paths(document: Mapping[str, Any], above: Path) -> Iterator[Path]:
    for name, value in document.items():
        path = (*above, name)
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)
