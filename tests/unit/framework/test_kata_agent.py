"""The list of tests in which kata-agent differs: it names tests that exist, and a run holds it to be true."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from integration.framework.kata_agent import differences

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from integration.framework.kata_agent import Difference, mark

LISTED = (
    Difference(reason="known", tests=("test_a.py::test_fails", "test_a.py::test_each[2]")),
    Difference(reason="known", tests=("test_a.py::test_passes_now",)),
    Difference(reason="not ours", tests=("test_b.py",), runs=False),
)

def pytest_collection_modifyitems(items):
    mark(items, LISTED)
"""
TEST_A = """
import pytest

def test_fails():
    raise AssertionError

def test_passes_now():
    pass

def test_fails_unlisted():
    raise AssertionError

@pytest.mark.parametrize("number", [1, 2])
def test_each(number):
    assert number == 1
"""


def test_a_listed_test_must_fail_and_no_other_may(tmp_path: Path) -> None:
    for name, text in (("conftest.py", CONFTEST), ("test_a.py", TEST_A), ("test_b.py", TEST_A)):
        (tmp_path / name).write_text(text)
    argv = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    said = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout

    told = (line.split() for line in said.splitlines() if " test_a.py::" in line)
    assert {name.partition("::")[2]: outcome for outcome, name, *_ in told} == {
        "test_fails": "XFAIL",
        "test_passes_now": "FAILED",
        "test_fails_unlisted": "FAILED",
        "test_each[1]": "PASSED",
        "test_each[2]": "XFAIL",
    }
    assert "[XPASS(strict)] known" in said
    assert "5 skipped" in said


def test_every_listed_test_is_there_once_and_has_a_reason() -> None:
    listed = [name for difference in differences() for name in difference.tests]
    there = set()
    for file in (ROOT / "integration").glob("test_*.py"):
        names = (node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
        there |= {file.name, *(f"{file.name}::{name}" for name in names if name.startswith("test_"))}

    assert [name for name in listed if name.partition("[")[0] not in there] == []
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    assert [difference for difference in differences() if len(difference.reason) < 20] == []
