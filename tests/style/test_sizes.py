"""Files and functions that ask to be split. The exceptions are listed, with the size they may not outgrow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .project_files import parsed, python_files, shown

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}


@pytest.mark.parametrize("path", list(python_files()), ids=shown)
def test_file_is_not_too_long(path: Path) -> None:
    lines = len(path.read_text().splitlines())

    assert lines <= LONGER_FILES.get(shown(path), MAX_FILE_LINES), f"{shown(path)}: {lines} lines, split it by noun"


@pytest.mark.parametrize("path", list(python_files()), ids=shown)
def test_functions_are_not_too_long(path: Path) -> None:
    long = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, lines = f"{shown(path)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGER_FUNCTIONS.get(name, MAX_FUNCTION_LINES):
                long.append(f"{name}: {lines} lines")

    assert long == []


def test_listed_exceptions_are_still_needed() -> None:
    """An exception whose reason is gone is removed, so that the list says what is true."""
    lines = {shown(path): len(path.read_text().splitlines()) for path in python_files()}

    assert [name for name in LONGER_FILES if lines.get(name, 0) <= MAX_FILE_LINES] == []
