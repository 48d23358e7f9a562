"""The files of the project as the style tests see them: everything in the checkout that is written by hand.

Each directory is listed once and each file is read and parsed once in a process.
"""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".venv", ".build", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
_NOT_OURS_AT_TOP = {"bin", "dist", "build"}
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@functools.cache
def text_files() -> tuple[Path, ...]:
    """Every file that is text and not generated, sorted."""
    found = []
    for directory, names, files in os.walk(ROOT):
        here = Path(directory)
        skipped = _NOT_OURS | (_NOT_OURS_AT_TOP if here == ROOT else set())
        names[:] = sorted(name for name in names if name not in skipped and not name.endswith(".egg-info"))
        for name in sorted(set(files) - skipped):  # in a worktree `.git` is a file
            if not name.endswith((*_GENERATED, ".svg", ".png", ".pyc")) and b"\0" not in _first_bytes(here / name):
                found.append(here / name)
    return tuple(found)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


@functools.cache
def python_files(*below: str) -> tuple[Path, ...]:
    """Every Python file, or those below the named top-level directories."""
    return tuple(
        path
        for path in text_files()
        if path.suffix == ".py" and (not below or path.relative_to(ROOT).parts[0] in below)
    )


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def text(path: Path) -> str:
    return path.read_text(errors="replace")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text(path), filename=str(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
