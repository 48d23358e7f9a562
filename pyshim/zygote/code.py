"""Finds out when the files of the loaded code have changed on disk."""

import os
import sys
import time

from pyshim.host.syscalls import (
    IN_ATTRIB,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_MODIFY,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    inotify_add_watch,
    inotify_drain,
    inotify_init,
)
from pyshim.start.invocation import CommandError, os_failure

STARTED_NS = time.time_ns()
_CLOCK_STEP_NS = 100_000_000
"""Files carry the kernel's coarse clock, which lags behind `time.time_ns` by up to a tick (10 ms at most)."""
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"
_CHANGES = IN_MODIFY | IN_ATTRIB | IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF


class LoadedCode:
    """Watches the directories that this process has loaded modules from, by inotify(7).

    The kernel notes a change before the call that makes it returns, so no process that began after a change finds the
    code current. A change that another machine makes to a network file system is not noted. Raises CommandError where
    the kernel has no watches left, or where a file of ours changed since this process began: the loaded code may be
    older.
    """

    def __init__(self) -> None:
        paths = _loaded_paths()
        try:
            self._changes_fd = inotify_init()
            for directory in sorted({os.path.dirname(path) for path in paths}):
                inotify_add_watch(self._changes_fd, directory, _CHANGES)
        except OSError as error:
            raise os_failure("watch", "directories of the loaded code", error) from error
        for path in sorted(paths):
            if _is_ours(path) and os.stat(path).st_ctime_ns > STARTED_NS - _CLOCK_STEP_NS:
                raise CommandError(f"use the loaded code: {path!r} changed while it was being loaded")
        self._roots = {path: _identity(path) for path in sys.path}

    def is_current(self) -> bool:
        """True while nothing in these directories has changed, and nothing was mounted or moved over them."""
        return not inotify_drain(self._changes_fd) and all(
            _identity(path) == identity for path, identity in self._roots.items()
        )


def _identity(path: str) -> tuple[int, int]:
    """Device and inode; zeros if the file is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _is_ours(path: str) -> bool:
    return path.endswith(".py") and path.startswith(_HOME)


def _loaded_paths() -> set[str]:
    paths = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return {path for path in paths if path and os.path.isabs(path)}
