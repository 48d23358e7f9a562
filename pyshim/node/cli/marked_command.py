"""One command for a shell on a terminal: the line to type, and its output between two marked lines. No I/O.

A debug console cannot run one command or report its end, so the command is typed to the shell, between two printed
lines that mark where its output begins and ends.
"""

import re
import shlex
import uuid

from pyshim.model.errors import InvalidArgument

_MAX_LINE_BYTES = 4000
"""A terminal takes lines of 4096 bytes. Source: termios(3), MAX_CANON of Linux."""


def marked_line(words: tuple[str, ...], *, with_input: bool = False) -> tuple[bytes, bytes, bytes]:
    """The line to type, and the markers that begin the lines before and after the output.

    The typed line has each marker in two parts, so that the terminal's echo is not taken for it; the shell prints it
    whole. No "exit" is typed at the end: a guest may close the console at once and lose the last output. `cat` reads
    any input that the command leaves, which the shell would execute.
    """
    token = uuid.uuid4().hex
    quoted = shlex.join(words)
    if any(character < " " and character != "\t" for character in quoted):
        raise InvalidArgument("type command: it has a line break or another control character")
    run = f"printf '\\n%s%s\\n' b {token}; {{}}; printf '\\n%s%s:%d\\n' e {token} $?"
    if with_input:
        text = f"stty -echo || exit; {run.format(f'base64 -d | {quoted}')}; exec cat >/dev/null\n"
    else:
        text = f"{run.format(f'{quoted} </dev/null')}\n"
    line = text.encode()
    if len(line) > _MAX_LINE_BYTES:
        raise InvalidArgument(f"type command: {len(line)} bytes with its marks, at most {_MAX_LINE_BYTES}")
    return line, f"b{token}".encode(), f"e{token}:".encode()


class MarkedOutput:
    """The output between the markers, piece by piece, with the program's line ends in place of the terminal's."""

    def __init__(self, begin: bytes, end: bytes) -> None:
        self._begin = re.compile(b"\n" + re.escape(begin) + b"\r?\n")
        self._begin_bytes = len(begin) + 3
        """The longest part of a begin marker that may have arrived."""
        self._end = re.compile(b"\r?\n" + re.escape(end) + b"(\\d{1,3})\r?\n")
        self._kept_bytes = len(end) + 16
        """The last bytes are not written yet: they may begin an end marker."""
        self._waiting = b"\n"
        self.has_begun = False
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """The bytes that are certainly output."""
        if self.exit_code is not None:
            return b""
        self._waiting += data
        if not self.has_begun:
            found = self._begin.search(self._waiting)
            if found is None:
                self._waiting = self._waiting[-self._begin_bytes :]
                return b""
            self.has_begun = True
            self._waiting = self._waiting[found.end() :]
        if found := self._end.search(self._waiting):
            self.exit_code = int(found[1]) & 0xFF
            return _plain(self._waiting[: found.start()])
        ready = len(self._waiting) - self._kept_bytes
        if ready <= 0:
            return b""
        if self._waiting[ready - 1 : ready] == b"\r":
            ready -= 1
        out, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return _plain(out)


def _plain(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")
