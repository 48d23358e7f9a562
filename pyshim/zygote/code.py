"""What of a process's code is on disk: whether it still is what was loaded."""

import os
import sys
import time

STARTED_NS = time.time_ns()
_CLOCK_STEP_NS = 100_000_000
"""Files carry the kernel's coarse clock, which lags behind the fine one."""
Stamp = dict[str, tuple[int, int, int]]
"""Change time, inode and size by path."""


def code_stamp() -> Stamp:
    """When each file of ours that is loaded, and each directory that others are loaded from, last changed."""
    return {path: _stamp_of(path) for path in _loaded_paths()}


def is_current(stamp: Stamp) -> bool:
    """Whether every file is as it was."""
    return all(_stamp_of(path) == noted for path, noted in stamp.items())


def _stamp_of(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ctime_ns, found.st_ino, found.st_size


def require_settled(stamp: Stamp) -> None:
    """No file of ours changed since this process began: what is loaded is what is there. Raises OSError."""
    for path, (moment, _, _) in stamp.items():
        if path.endswith(".py") and moment > STARTED_NS - _CLOCK_STEP_NS:
            raise OSError(f"use the loaded code: {path!r} changed while it was being loaded")


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
