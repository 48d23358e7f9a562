"""What of a process's code is on disk: whether it still is what was loaded."""

import os
import sys
import time
from typing import NamedTuple

from pyshim.start.errors import BootstrapError

STARTED_NS = time.time_ns()
_CLOCK_STEP_NS = 100_000_000
"""Files carry the kernel's coarse clock, which lags behind `time.time_ns` by up to a tick (10 ms at most)."""


class Stamp(NamedTuple):
    """Two strings, and not an object for each file: to look at an object is to write to the page that it is in."""

    paths: str
    """With NUL between them."""
    facts: str
    """Change time, inode and size of each."""


def code_stamp() -> Stamp:
    """The state of each file of ours that is loaded, and of each directory that others are loaded from.

    Raises BootstrapError when a file of ours changed since this process began: the loaded code may be older.
    """
    paths = sorted(_loaded_paths())
    for path in paths:
        if path.endswith(".py") and _facts_of(path)[0] > STARTED_NS - _CLOCK_STEP_NS:
            raise BootstrapError(f"use the loaded code: {path!r} changed while it was being loaded")
    joined = "\0".join(paths)
    return Stamp(joined, _facts(joined))


def is_current(stamp: Stamp) -> bool:
    """Whether every file is as it was."""
    return _facts(stamp.paths) == stamp.facts


def _facts(paths: str) -> str:
    return repr([_facts_of(path) for path in paths.split("\0")])


def _facts_of(path: str) -> tuple[int, int, int]:
    """Zeros where there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ctime_ns, found.st_ino, found.st_size


def _loaded_paths() -> set[str]:
    paths = set()
    for name, module in tuple(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and os.path.isabs(path):
            is_ours = name.split(".")[0] in ("pyshim", "hypervisors", "protos")
            paths.add(path if is_ours else os.path.dirname(path))
    return paths
