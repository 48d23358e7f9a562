"""Small files and trees of files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def read_text(path: str) -> str:
    """The whole file, as UTF-8; other bytes become lone surrogates. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode("utf-8", "surrogateescape")


@contextmanager
def opened(path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Iterator[int]:
    """The descriptor of `path`, closed after the block. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def tail(path: str, max_bytes: int) -> bytes:
    """The last bytes of a regular file, which is not reached by a link; empty for anything else. Raises OSError."""
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        found = os.fstat(fd)
        return os.pread(fd, max_bytes, max(0, found.st_size - max_bytes)) if stat.S_ISREG(found.st_mode) else b""


def write_text(path: str, text: str) -> None:
    """`text` was written to the existing file (usually of /proc or /sys) in one write(2). Raises OSError."""
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, text.encode("utf-8", "surrogateescape"))


def names_in(folder: str) -> list[str]:
    """The sorted names in `folder`; empty if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def remove_file(path: str) -> None:
    """`path` is gone."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """`path` and everything in it is gone, except mount points with their content and parents."""
    try:
        before = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(before.st_mode):
        os.unlink(path)
        return
    _empty(path, before.st_dev)
    with suppress(OSError):  # a mount point is left in it
        os.rmdir(path)


def _empty(path: str, device: int) -> None:
    with os.scandir(path) as entries:
        for entry in list(entries):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif entry.stat(follow_symlinks=False).st_dev == device:
                _empty(entry.path, device)
                with suppress(OSError):  # a bind mount of the same file system, or the parent of a mount point
                    os.rmdir(entry.path)
