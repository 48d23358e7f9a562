"""Locks on directories: flock(2), which ends with the process that has it."""

import fcntl
import os
import time

from pyshim.host.fds import OwnedFd

_PAUSE_S = 0.01
"""Seconds between two attempts."""


def open_directory(path: str) -> OwnedFd:
    """A descriptor to lock. Raises OSError."""
    return OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def lock_within(directory: OwnedFd, wait_s: float) -> bool:
    """The directory is locked until its descriptor is closed; False when others have the lock for so long. Blocking."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(directory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True
