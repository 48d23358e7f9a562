"""The guest's consoles: read at a limited pace into a bounded buffer and a bounded file."""

import logging
import os
import socket
from contextlib import suppress

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import describe_os_error
from pyshim.host.untrusted_text import PacedText

log = logging.getLogger(__name__)

TAIL_LINES = 50
MAX_SHOWN_CHARS = 240
"""Characters of one line in an error text."""
MAX_FILE_BYTES = 256 * 1024
"""Of the log, and of one older log. A VM's directory is in memory on most hosts."""


class Console:
    """The guest's console and serial port as text. After `close` the last lines can still be read."""

    def __init__(self, *, log_path: str, to_log: bool) -> None:
        self._path = log_path
        self._to_log = to_log
        self._file_bytes = 0
        self._fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._channels: list[PacedText] = []

    def attach(self, ours: socket.socket) -> None:
        """Reads the guest's output from `ours` from now on. The console owns the socket."""
        ours.setblocking(False)
        self._channels.append(PacedText(OwnedFd(ours.detach()), max_lines=TAIL_LINES, on_line=self.write_line))

    def write_line(self, line: str) -> None:
        """Called for each complete line: writes it to the file. A full file becomes the one older file."""
        if self._to_log:
            log.debug("guest console", extra={"line": line})
        if self._fd < 0:
            return
        data = line.encode() + b"\n"
        try:
            if self._file_bytes + len(data) > MAX_FILE_BYTES:
                os.replace(self._path, f"{self._path}.1")
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                fresh = os.open(self._path, flags, 0o600)
                os.close(self._fd)
                self._fd, self._file_bytes = fresh, 0
            self._file_bytes += os.write(self._fd, data)
        except OSError as error:
            log.warning("console log ends here", extra={"path": self._path, "error": describe_os_error(error)})
            self._close_file()

    def lines(self) -> tuple[str, ...]:
        """The last lines of the first channel that shows a panic, else of the first that has any."""
        tails = [channel.tail.lines() for channel in self._channels]
        chosen = next((tail for tail in tails if names_panic(tail)), next((tail for tail in tails if tail), ()))
        return tuple(line[:MAX_SHOWN_CHARS] for line in chosen)

    def drain(self) -> None:
        for channel in self._channels:
            channel.drain()

    def close(self) -> None:
        """Idempotent."""
        for channel in self._channels:
            channel.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def names_panic(lines: tuple[str, ...]) -> bool:
    return any("Kernel panic - not syncing" in line for line in lines)
