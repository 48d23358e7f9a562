"""The stdio of a process, and events of a file descriptor.

Unlike asyncio's streams these do not buffer. The kernel's pipe is the buffer, so a cancelled read loses no bytes, a
written byte is in the pipe, and back-pressure is the kernel's. At the end of a stream every read returns empty data, as
kata-agent's do.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable

from guest.agent.errors import FailedPrecondition


class _Stream:
    """One end of a pipe, or a terminal's master. Owns `fd`."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self.closed = False

    async def _ready(self, *, to_write: bool) -> None:
        """The kernel says that the next read or write does not block, or the stream was closed."""
        loop = asyncio.get_running_loop()
        add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
        self._news.clear()
        add(self._fd, self._news.set)
        try:
            await self._news.wait()
        finally:
            if not self.closed:
                remove(self._fd)

    def close(self) -> None:
        """Calls that wait go on, and find the stream closed. Idempotent."""
        if not self.closed:
            self.closed = True
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._fd)
            loop.remove_writer(self._fd)
            os.close(self._fd)
            self._news.set()


class ReadEnd(_Stream):
    """A process's stdout or stderr. It is closed at its end: when its last writer, perhaps a child that outlives the
    process, has closed it.
    """

    _was_read = False

    async def read(self, size: int) -> bytes:
        """Up to `size` bytes as soon as there are any; b"" at the end. Concurrent readers are served in order, each its
        own bytes.
        """
        self._was_read = True
        async with self._lock:
            while not self.closed:
                try:
                    data = os.read(self._fd, size)
                except BlockingIOError:
                    await self._ready(to_write=False)
                    continue
                except OSError as error:
                    if error.errno != errno.EIO:  # EIO: a terminal whose last user is gone
                        raise
                    data = b""
                if data:
                    return data
                self.close()
            return b""

    def is_unread(self) -> bool:
        """The stream is closed, or no read waits and none has come since the last call of this method."""
        was_read, self._was_read = self._was_read or self._lock.locked(), False
        return self.closed or not was_read


class WriteEnd(_Stream):
    """A process's stdin."""

    async def write(self, data: bytes) -> None:
        """All of `data` is in the pipe; concurrent writes keep their order. FailedPrecondition: the reader is gone."""
        async with self._lock:
            view = memoryview(data)
            while view:
                if self.closed:
                    raise FailedPrecondition("write stdin: it is closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._ready(to_write=True)
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.EIO):
                        raise
                    self.close()

    async def finish(self) -> None:
        """Closed after every write asked for before this call has reached the pipe."""
        async with self._lock:
            self.close()


class EdgeEvents:
    """`callback` runs each time the kernel announces `events` (of epoll) about `fd`, once for each announcement.

    asyncio calls a reader as long as a state lasts, and some files never leave it: a virtio-serial port without a host
    is always hung up. `callback` reads the file. `fd` stays the caller's.
    """

    def __init__(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._epoll = select.epoll()
        self._epoll.register(fd, events | select.EPOLLET)
        asyncio.get_running_loop().add_reader(self._epoll, self._announced)

    def _announced(self) -> None:
        self._epoll.poll(0)
        self._callback()

    def close(self) -> None:
        if not self._epoll.closed:
            asyncio.get_running_loop().remove_reader(self._epoll)
            self._epoll.close()
