"""Streams that are plain files: `file://` logs, a path that is not a FIFO, /dev/null."""

import os

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.own_thread import in_own_thread
from pyshim.host.streams.fifos import READ_BYTES, open_fd


class FileOutput:
    """A file written at its end. Opened once per stream: with O_APPEND, two streams may share a file."""

    def __init__(self, fd: OwnedFd, path: str) -> None:
        self._fd = fd
        self._path = path

    async def write(self, data: bytes | memoryview) -> None:
        """All of `data` is in the file. Raises FailedPrecondition naming the file when it cannot be (disk full)."""
        if not self._fd.is_open:
            return
        # In a thread: a slow or dead disk must not stop every other stream of the pod. On a descriptor of its own,
        # so that a close or cancellation in the middle cannot hand the thread another file.
        copy = OwnedFd(os.dup(self._fd.fileno()))
        with os_errors(f"write {self._path!r}"):
            await in_own_thread(_write_all_and_close, copy, data)

    async def close(self) -> None:
        self._fd.close()

    finish = close
    """Written bytes are in the file; there is no reader to wait for."""


def _write_all_and_close(fd: OwnedFd, data: bytes | memoryview) -> None:
    with fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd.fileno(), view) :]


class FileInput:
    """A stdin that is not a FIFO: read to its end, which CloseIO does not change."""

    def __init__(self, fd: OwnedFd, path: str) -> None:
        self._fd = fd
        self._path = path

    async def read(self) -> bytes:
        if not self._fd.is_open:
            return b""
        copy = OwnedFd(os.dup(self._fd.fileno()))
        with os_errors(f"read {self._path!r}"):
            return await in_own_thread(_read_and_close, copy)

    def close_io(self) -> None:
        """No effect: there is no other writer."""

    async def close(self) -> None:
        self._fd.close()


def _read_and_close(fd: OwnedFd) -> bytes:
    with fd:
        return os.read(fd.fileno(), READ_BYTES)


def open_file_output(path: str, stream: str) -> FileOutput:
    """An existing file (or device) to append to. Raises ShimError naming it."""
    return FileOutput(open_fd(path, os.O_WRONLY | os.O_APPEND, stream), path)


def open_log_file(path: str, stream: str) -> FileOutput:
    """The log file of a `file://` URI, made with its directories when missing. Raises ShimError naming it."""
    with os_errors(f"open {stream} log {path!r}"):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    return FileOutput(OwnedFd(fd), path)


def open_file_input(path: str) -> FileInput:
    """A file (or device) to read to its end. Raises ShimError naming it."""
    return FileInput(open_fd(path, os.O_RDONLY, "stdin"), path)
