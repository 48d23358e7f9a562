"""What of a process's code is on disk: whether it still is what was loaded."""

import os
import sys
import time
from array import array
from typing import NamedTuple

STARTED_NS = time.time_ns()
_CLOCK_STEP_NS = 100_000_000
"""Files carry the kernel's coarse clock, which lags behind the fine one."""
_FACTS = 3


class Stamp(NamedTuple):
    """Few objects for many files: a fork makes a copy of every page with an object that it so much as looks at."""

    paths: str
    """With NUL between them."""
    facts: "array[int]"
    """Of each path, in that order, `_facts_of`."""


def code_stamp() -> Stamp:
    """When each file of ours that is loaded, and each directory that others are loaded from, last changed."""
    paths = "\0".join(_loaded_paths())
    return Stamp(paths, _facts(paths))


def is_current(stamp: Stamp) -> bool:
    """Whether every file is as it was."""
    return _facts(stamp.paths) == stamp.facts


def require_settled(stamp: Stamp) -> None:
    """No file of ours changed since this process began: what is loaded is what is there. Raises OSError."""
    for path, moment in zip(stamp.paths.split("\0"), stamp.facts[::_FACTS], strict=True):
        if path.endswith(".py") and moment > STARTED_NS - _CLOCK_STEP_NS:
            raise OSError(f"use the loaded code: {path!r} changed while it was being loaded")


def _facts(paths: str) -> "array[int]":
    facts = array("Q")
    for path in paths.split("\0"):
        facts.extend(_facts_of(path))
    return facts


def _facts_of(path: str) -> tuple[int, int, int]:
    """Change time, inode and size; zeros where there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ctime_ns, found.st_ino, found.st_size


def _loaded_paths() -> tuple[str, ...]:
    ours, directories = set(), set()
    for name, module in tuple(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not os.path.isabs(path):
            continue
        if name.split(".")[0] in ("pyshim", "hypervisors", "protos"):
            ours.add(path)
        else:
            directories.add(os.path.dirname(path))
    return (*sorted(ours), *sorted(directories))
