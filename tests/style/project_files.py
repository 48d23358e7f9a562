"""The files of the project as the style tests see them: everything in the checkout that is written by hand."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".venv", ".build", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
_NOT_OURS_AT_TOP = {"bin", "dist", "build"}
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def text_files() -> Iterator[Path]:
    """Every file that is text and not generated, sorted."""
    for directory, names, files in os.walk(ROOT):
        here = Path(directory)
        skipped = _NOT_OURS | (_NOT_OURS_AT_TOP if here == ROOT else set())
        names[:] = sorted(n for n in names if n not in skipped and not n.endswith(".egg-info"))
        for name in sorted(set(files) - _NOT_OURS):  # a worktree's .git is a file
            if (
                name not in skipped  # in a worktree `.git` is a file
                and not name.endswith((*_GENERATED, ".svg", ".png", ".pyc"))
                and b"\0" not in (here / name).read_bytes()[:4096]
            ):
                yield here / name


def python_files(*below: str) -> Iterator[Path]:
    """Every Python file, or those below the named top-level directories."""
    for path in text_files():
        inside = path.relative_to(ROOT)
        if path.suffix == ".py" and (not below or inside.parts[0] in below):
            yield path


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
