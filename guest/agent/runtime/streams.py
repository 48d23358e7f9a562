"""A process's stdio as the calls see it. Nothing is buffered here: the kernel's pipe is the buffer, so back-pressure is
the kernel's.

End of stream is empty data, again and again, as kata-agent answers it.
"""

from __future__ import annotations

import os
import select

from guest.agent.errors import EIO, EPIPE, FailedPrecondition
from guest.agent.runtime.loop import Lock, Loop, Promise

# After a process is gone only its surviving children can still write. kata-agent gives them the same half second
# before it says "end".
_LINGER_S = 0.5


class Source:
    """The read end of a process's stdout or stderr, or a terminal's master. Owns `fd`."""

    def __init__(self, loop: Loop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._lock = Lock(loop)
        self._exited = False
        self._readable: Promise | None = None
        self.at_end = False

    async def read(self, size: int) -> bytes:
        """Up to `size` bytes as soon as there are any; b"" at the end. Concurrent readers are served in order, each its
        own bytes.
        """
        await self._lock.acquire()
        try:
            while not self.at_end:
                try:
                    data = os.read(self._fd, size)
                except BlockingIOError:
                    await self._wait()
                    continue
                except OSError as error:
                    if error.errno != EIO:  # EIO: a terminal whose last user is gone
                        raise
                    data = b""
                if data:
                    return data
                self.close()
            return b""
        finally:
            self._lock.release()

    async def _wait(self) -> None:
        readable = self._readable = Promise(self._loop)
        self._loop.watch(self._fd, select.EPOLLIN, lambda _events: readable.resolve(True))
        timer = self._loop.call_later(_LINGER_S, lambda: readable.resolve(False)) if self._exited else None
        try:
            if not await readable and self._exited:
                self.close()
        finally:
            self._readable = None
            if timer is not None:
                timer.cancel()
            if not self.at_end:
                self._loop.unwatch(self._fd)

    def process_exited(self) -> None:
        """From now on a read that finds nothing for half a second is the end, even if someone keeps the pipe open."""
        self._exited = True
        if self._readable is not None:
            readable = self._readable
            self._loop.call_later(_LINGER_S, lambda: readable.resolve(False))

    def close(self) -> None:
        """The stream is at its end for every reader; idempotent."""
        if not self.at_end:
            self.at_end = True
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            if self._readable is not None:
                self._readable.resolve(True)


class Sink:
    """The write end of a process's stdin, or a terminal's master. Owns `fd`."""

    def __init__(self, loop: Loop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._lock = Lock(loop)
        self._writable: Promise | None = None
        self.closed = False

    async def write(self, data: bytes) -> None:
        """All of `data` is in the pipe; concurrent writes keep their order. FailedPrecondition: the reader is gone."""
        await self._lock.acquire()
        try:
            view = memoryview(data)
            while view:
                if self.closed:
                    raise FailedPrecondition("write stdin: it is closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._wait()
                except OSError as error:
                    if error.errno not in (EPIPE, EIO):
                        raise
                    self.close()
        finally:
            self._lock.release()

    async def _wait(self) -> None:
        writable = self._writable = Promise(self._loop)
        self._loop.watch(self._fd, select.EPOLLOUT, lambda _events: writable.resolve())
        try:
            await writable
        finally:
            self._writable = None
            if not self.closed:
                self._loop.unwatch(self._fd)

    async def finish(self) -> None:
        """Closed after every write asked for before this call has reached the pipe."""
        await self._lock.acquire()
        self._lock.release()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            if self._writable is not None:
                self._writable.resolve()
