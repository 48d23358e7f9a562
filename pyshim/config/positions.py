"""The line of each key and table in a TOML text, which `tomllib` does not report.

A header, or a key with its value, is a TOML text by itself: the text is read again, one of them at a time.
"""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
_ENDS = ("]", '"""', "'''")
"""A line without any of these does not end a value that goes over several lines."""
_MAX_TRIES = 100
"""Lines with one of these that did not end the value: each time all of the value was read."""


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every key and table of a text that `tomllib` has accepted.

    All items of an array of tables share the array's path. After `_MAX_TRIES` no further line is known.
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
    """The line of each header and each key with its value, whether it is a header, and the document that it makes."""
    statement, first, tries = "", 0, 0
    for number, line in enumerate(text.split("\n"), start=1):
        first = first or number
        statement += f"{line}\n"
        if number != first and not any(end in line for end in _ENDS):
            continue
        try:
            document = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            tries += 1
            if tries > _MAX_TRIES:
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
