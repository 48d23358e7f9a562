"""How much a test of load bears: little among all tests, its full size in `make peers WHAT=load`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

CHOICE = "PYSHIM_TEST_LOAD"
FULL = bool(os.environ.get(CHOICE))


def amount(few: int, full: int) -> int:
    """So many pods, containers or rounds."""
    return full if FULL else few


def sample(rows: Sequence[T], every: int) -> Sequence[T]:
    """All rows, or each `every`th of them beginning with the first."""
    return rows if FULL else rows[::every]
