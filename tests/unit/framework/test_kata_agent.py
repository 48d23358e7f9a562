"""The list of tests in which kata-agent differs names tests that exist, once each."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from integration.framework.kata_agent import differences

ROOT = Path(__file__).resolve().parents[3]


def test_every_listed_test_is_there_once_and_has_a_reason() -> None:
    listed = [name for difference in differences() for name in difference.tests]
    there = set()
    for file in (ROOT / "integration").glob("test_*.py"):
        names = (node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
        there |= {file.name, *(f"{file.name}::{name}" for name in names if name.startswith("test_"))}

    assert [name for name in listed if name.partition("[")[0] not in there] == []
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    assert [difference for difference in differences() if len(difference.reason) < 20] == []
