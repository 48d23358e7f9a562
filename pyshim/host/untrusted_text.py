"""The text of a program that is not trusted: read as lines at a pace the host chooses, its last lines kept.

What is kept is bounded in lines and in bytes, and free of control characters.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable

from pyshim.host.fds import OwnedFd

MAX_LINE_BYTES = 1024


def printable(text: str) -> str:
    """`text` on one line, without terminal escapes: safe in an error message or a log field.

    What could move a cursor, turn the direction of writing, fake a log line or hide is left out.
    """
    text = _without_escapes(text).replace("\t", " ")
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def _without_escapes(text: str) -> str:
    """`text` without ANSI sequences, parameters included (`ESC [ 31 m` would otherwise leave `[31m`)."""
    if "\x1b" not in text:
        return text
    head, *rest = text.split("\x1b")
    return head + "".join(_after_escape(part) for part in rest)


def _after_escape(part: str) -> str:
    if not part.startswith("["):
        return part[1:]
    for index, char in enumerate(part[1:], start=1):
        if "@" <= char <= "~":
            return part[index + 1 :]
    return ""


class TextTail:
    """Bytes in, the last `max_lines` printable lines kept; every finished line also goes to `on_line`.

    A line longer than MAX_LINE_BYTES is cut into pieces, so that a peer that never sends a newline costs no memory.
    """

    def __init__(self, *, max_lines: int, on_line: Callable[[str], None] | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._partial = b""
        self._on_line = on_line

    def feed(self, data: bytes) -> None:
        *finished, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
        for line in finished:
            self._finish(line)
        while len(self._partial) > MAX_LINE_BYTES:
            self._finish(self._partial[:MAX_LINE_BYTES])
            self._partial = self._partial[MAX_LINE_BYTES:]

    def finish(self) -> None:
        """The stream has ended: an unfinished line counts as one."""
        self._finish(self._partial)
        self._partial = b""

    def _finish(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE_BYTES):
            text = printable(line[start : start + MAX_LINE_BYTES].decode("utf-8", "replace")).rstrip()
            if text:
                self._lines.append(text)
                if self._on_line is not None:
                    self._on_line(text)

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, an unfinished one included."""
        partial = printable(self._partial.decode("utf-8", "replace")).rstrip()
        return (*self._lines, partial) if partial else tuple(self._lines)

    def text(self) -> str:
        return "\n".join(self.lines())


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
        try:
            self._loop.add_reader(self._fd.fileno(), self._readable)
        except OSError as error:  # such as ENOSPC: the user has too many watches
            self._on_line(f"(not read any further: {error.strerror})")
            self.close()

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
