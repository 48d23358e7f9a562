"""FIFOs between a client (containerd, ctr, the CRI plugin) and a process in the guest.

Neither opening nor closing waits for the client. The shim keeps its own handle on the client's side, so that streams
survive the client: a reader that vanishes (containerd restarts) causes back-pressure instead of SIGPIPE, and a stdin
without its client does not end before CloseIO. Source: containerd's runc shim, process/io.go.
"""

import asyncio
import contextlib
import fcntl
import os
import select
import stat
import sys
import termios
from collections.abc import Callable

from pyshim.host.fds import OwnedFd
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError

READ_BYTES = 256 * 1024
_FIRST_PIPE_BYTES = 64 * 1024
"""The kernel's default, enough for the many pipes that carry a line or nothing."""
_PIPE_BYTES = 1024 * 1024
"""The size of a pipe after it was full: the smaller one costs a wake-up of both sides for every 64 KiB."""

UNREAD_S = 1.0
"""Seconds that an ended stream waits for a reader that takes no bytes: enough on a busy node, and a short delay for the
exit of a process without a reader."""
FINISH_S = 10.0
"""Seconds for a reader that is slow to take the rest of an ended stream; containerd's runc shim waits as long."""
_FINISH_POLL_S = 0.001
"""Seconds between the first two looks at what is unread; the pauses double. The kernel gives no event for a pipe
that has become empty."""
_FINISH_POLL_MAX_S = 0.05


def open_fd(path: str, flags: int, stream: str) -> OwnedFd:
    """`path` open. Raises InvalidArgument naming stream and path if it does not exist, FailedPrecondition otherwise."""
    try:
        return OwnedFd(os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError as error:
        kind = InvalidArgument if isinstance(error, (FileNotFoundError, NotADirectoryError)) else FailedPrecondition
        raise kind(f"open {stream} {path!r}: {error.strerror}") from error


def _widen(fd: OwnedFd) -> None:
    """The pipe holds up to a mebibyte if the kernel allows it."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _unread_bytes(fd: OwnedFd) -> int:
    return int.from_bytes(fcntl.ioctl(fd.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def _has_reader(fd: OwnedFd) -> bool:
    """A reading end of the pipe is open. Source: poll(2), POLLERR for the writing end of a pipe."""
    poll = select.poll()
    poll.register(fd.fileno(), 0)
    return not poll.poll(0)


def is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


class Readiness:
    """Waits until the loop can read or write one fd. One wait at a time."""

    def __init__(self, fd: OwnedFd, *, writing: bool) -> None:
        self._fd = fd
        self._writing = writing
        self._stop: Callable[[], None] | None = None

    async def wait(self) -> None:
        """The fd is ready, or `end` was called."""
        loop = asyncio.get_running_loop()
        number = self._fd.fileno()
        waiter: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if self._writing else (loop.add_reader, loop.remove_reader)

        def stop() -> None:
            # In one stretch with closing the fd: the loop must not watch a number that may be given to another file.
            remove(number)
            if not waiter.done():
                waiter.set_result(None)

        if self._stop is not None:
            raise RuntimeError(f"wait for fd {number}: another task already waits")
        add(number, self.end)
        self._stop = stop
        try:
            await waiter
        finally:
            self.end()

    def end(self) -> None:
        """No task waits any more and the loop has forgotten the fd. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


class PipeOutput:
    """The writing end of a pipe; `write` waits for a slow reader, and drops the data if the pipe has no reader.

    `close` never waits: a `write` still waiting ends at once and its rest is dropped (the way to abort it), bytes
    already written stay readable, and the reader sees end of file after them. One writer at a time.
    """

    def __init__(self, fd: OwnedFd, *, keep_alive: OwnedFd | None = None, was_read: bool = True) -> None:
        """Owns `fd` (non-blocking) and `keep_alive`, the reading handle that keeps a FIFO open without a client.

        `was_read`: a client has had the pipe open.
        """
        self._fd = fd
        self._keep_alive = keep_alive
        self._was_read = was_read
        self._writable = Readiness(fd, writing=True)
        self._is_wide = False

    async def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view and self._fd.is_open:
            try:
                written = os.write(self._fd.fileno(), view)
            except BlockingIOError:
                if self._is_wide:
                    await self._writable.wait()
                else:
                    self._is_wide = True
                    _widen(self._fd)
            except BrokenPipeError:
                return
            else:
                view = view[written:]

    async def finish(self) -> None:
        """The stream has ended, and its reader has taken all of it, or nothing for UNREAD_S, or took over FINISH_S.

        Without output it returns at once if a reader has opened the pipe, else after UNREAD_S.

        A client of containerd's Go library closes its end when it learns of the exit, also when bytes are left in the
        pipe. So the exit must not be published before the pipe is empty. Source: containerd cio/io_unix.go, `cancel`.

        That client opens its end in a thread, which would wait for ever if our end were already closed.
        """
        self._writable.end()
        if self._keep_alive is not None:
            self._keep_alive.close()
            await self._until_taken()
        self._fd.close()

    async def _until_taken(self) -> None:
        now = asyncio.get_running_loop().time
        moved_at = now()
        ends_at, pause_s, before = moved_at + FINISH_S, _FINISH_POLL_S, -1
        while self._fd.is_open and ((unread := _unread_bytes(self._fd)) or not self._is_known_to_be_read()):
            if unread != before:
                moved_at, before = now(), unread
            if now() >= min(moved_at + UNREAD_S, ends_at):
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _FINISH_POLL_MAX_S)

    def _is_known_to_be_read(self) -> bool:
        """True if a client has had the pipe open. Called after the shim's own reading handle is closed."""
        self._was_read = self._was_read or _has_reader(self._fd)
        return self._was_read

    async def close(self) -> None:
        self._writable.end()
        self._fd.close()
        if self._keep_alive is not None:
            self._keep_alive.close()


class FifoInput:
    """The reading end of a stdin FIFO, with a writing handle of our own until CloseIO.

    So its end comes only after CloseIO, when the client has closed its handles too and every byte was read.
    """

    def __init__(self, fd: OwnedFd, own_writer: OwnedFd) -> None:
        self._fd = fd
        self._own_writer = own_writer
        self._readable = Readiness(fd, writing=False)
        self._is_wide = False

    async def read(self) -> bytes:
        while self._fd.is_open:
            try:
                data = os.read(self._fd.fileno(), READ_BYTES)
            except BlockingIOError:
                await self._readable.wait()
            else:
                if len(data) >= _FIRST_PIPE_BYTES and not self._is_wide:
                    self._is_wide = True
                    _widen(self._fd)
                return data
        return b""

    def close_io(self) -> None:
        self._own_writer.close()

    async def close(self) -> None:
        self._readable.end()
        self._own_writer.close()
        self._fd.close()


def open_fifo_output(path: str, stream: str) -> PipeOutput:
    """The client's FIFO, open for writing whether or not the client reads. Raises ShimError naming it."""
    # Succeeds at once where there is a reader: ours.
    with open_fd(path, os.O_RDONLY | os.O_NONBLOCK, stream):
        fd = open_fd(path, os.O_WRONLY | os.O_NONBLOCK, stream)
    was_read = _has_reader(fd)
    try:
        keep_alive = open_fd(path, os.O_RDONLY | os.O_NONBLOCK, stream)
    except ShimError:
        fd.close()
        raise
    return PipeOutput(fd, keep_alive=keep_alive, was_read=was_read)


def open_fifo_input(path: str) -> FifoInput:
    """The client's stdin FIFO, open for reading whether or not the client writes. Raises ShimError naming it."""
    fd = open_fd(path, os.O_RDONLY | os.O_NONBLOCK, "stdin")
    try:
        own_writer = open_fd(path, os.O_WRONLY | os.O_NONBLOCK, "stdin")
    except ShimError:
        fd.close()
        raise
    return FifoInput(fd, own_writer)
