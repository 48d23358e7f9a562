"""Reads the text of a program that may print without end: as lines, at a pace the host chooses."""

import asyncio
import os
from collections.abc import Callable

from pyshim.host.fds import OwnedFd
from pyshim.host.text_tail import TextTail

BURST_BYTES = 512 * 1024
BURST_LINES = 4096
"""Lines cost more than bytes: each may be logged and written."""
PAUSE_S = 0.25
"""Seconds without reading after a burst, for which a flooding writer waits."""
_READ_BYTES = 16384
_DRAIN_BYTES = 1 << 20


class PacedText:
    """Owns `fd`, which does not block. The tail remains readable after the end."""

    def __init__(self, fd: OwnedFd, *, max_lines: int, on_line: Callable[[str], None]) -> None:
        self.tail = TextTail(max_lines=max_lines, on_line=self._count)
        self._on_line = on_line
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._left_bytes, self._left_lines = BURST_BYTES, BURST_LINES
        self._resume: asyncio.TimerHandle | None = None
        self._loop.add_reader(fd.fileno(), self._readable)

    def _count(self, line: str) -> None:
        self._left_lines -= 1
        self._on_line(line)

    def _readable(self) -> None:
        self._left_bytes -= self._read()
        if min(self._left_bytes, self._left_lines) <= 0 and self._fd.is_open:
            self._loop.remove_reader(self._fd.fileno())
            self._resume = self._loop.call_later(PAUSE_S, self._resumed)

    def _resumed(self) -> None:
        self._left_bytes, self._left_lines = BURST_BYTES, BURST_LINES
        self._resume = None
        self._loop.add_reader(self._fd.fileno(), self._readable)

    def _read(self) -> int:
        """Bytes read; 0 when there is nothing now or nothing more to come."""
        try:
            data = os.read(self._fd.fileno(), _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self.close()
            return 0
        self.tail.feed(data)
        return len(data)

    def drain(self) -> None:
        """Reads the waiting bytes after the writer has ended. Bounded: other processes may go on writing."""
        left_bytes = _DRAIN_BYTES
        while self._fd.is_open and left_bytes > 0:
            count = self._read()
            if count == 0:
                break
            left_bytes -= count
        self.tail.finish()

    def close(self) -> None:
        """Nothing more is read. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._fd.is_open:
            self._loop.remove_reader(self._fd.fileno())
            self._fd.close()
            self.tail.finish()
