"""File descriptors with exactly one owner."""

import os
from typing import Self


class OwnedFd:
    """An open file descriptor: closed by `close()` or on leaving a `with` block, unless `steal()` took it.

    At the latest it is closed with its last reference: work handed to a thread may be cancelled before it ever runs.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def fileno(self) -> int:
        """The number; raises ValueError once closed or stolen, so that a recycled number is never used."""
        if self._fd < 0:
            raise ValueError("use file descriptor: already closed")
        return self._fd

    def steal(self) -> int:
        """The number, which the caller owns now."""
        fd = self.fileno()
        self._fd = -1
        return fd

    def close(self) -> None:
        """Closed; idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def open_error(path: str) -> OSError | None:
    """Why the device cannot be opened to read and write; None when it can. It is closed again, never waited for."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error
    return None
