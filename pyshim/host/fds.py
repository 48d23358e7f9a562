"""File descriptors: with exactly one owner, waited for on the event loop, listening for a child that inherits them."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, Self, TypeVar

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import Internal, InvalidArgument, ShimError

P = ParamSpec("P")
T = TypeVar("T")


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


_SPARE_COUNT = 16
"""An undo has fewer open at the same time: a tree's removal one for each level."""
_spare: list[int] = []


def keep_spare_descriptors() -> None:
    """Descriptors are kept open that an undo can have when no other is free. Raises OSError."""
    while len(_spare) < _SPARE_COUNT:
        _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def with_spare_descriptors(undo: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns or raises as `undo` does, which is idempotent: it is tried again if it lacked a descriptor."""
    try:
        return undo(*args, **kwargs)
    except (OSError, ShimError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not _spare or not isinstance(cause, OSError) or cause.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    while _spare:
        os.close(_spare.pop())
    try:
        return undo(*args, **kwargs)
    finally:
        with suppress(OSError):
            keep_spare_descriptors()


async def until_readable(file: int | socket.socket) -> None:
    """The file can be read without waiting, or is at its end."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)


UNIX_PATH_BYTES = 107
"""The longest path of a unix socket, without the final NUL. Source: unix(7), sun_path."""


def listening_socket(path: str, *, mode: int = 0o600, backlog: int = 1) -> socket.socket:
    """A close-on-exec stream socket that listens at `path`, which has `mode` less the umask. Replaces a stale file."""
    if len(os.fsencode(path)) > UNIX_PATH_BYTES:
        raise InvalidArgument(f"listen at {path!r}: longer than {UNIX_PATH_BYTES} bytes, the limit of a unix socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if os.path.exists(path):
            os.unlink(path)
        # fchmod on an unbound socket decides the mode bind() gives the file (unix(7)), so there is no open moment.
        os.fchmod(listener.fileno(), mode)
        listener.bind(path)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise Internal(f"listen at {path!r}: {describe_os_error(error)}") from error
    return listener
