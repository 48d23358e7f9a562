"""The last lines of a stream that is not trusted: bounded in lines and in bytes, free of control characters."""

from collections import deque
from collections.abc import Callable

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
