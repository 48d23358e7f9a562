"""ruff, its formatter and mypy agree with the tree."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .project_files import ROOT


def _run(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    assert _run("ruff", "check", "--output-format", "concise", ".") == ""


def test_ruff_would_format_nothing() -> None:
    assert _run("ruff", "format", "--check", ".") == ""


@pytest.mark.timeout(220)
def test_mypy_strict_finds_nothing() -> None:
    assert _run("mypy") == ""
