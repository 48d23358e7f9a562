"""What the guest prints: read into a short memory and a small file, both bounded, at a pace the host chooses."""

import asyncio
import logging
import os
import socket
from contextlib import suppress

from pyshim.host.launch import describe_os_error
from pyshim.host.text_tail import TextTail

log = logging.getLogger("hypervisors.qemu.console")

TAIL_LINES = 50
MAX_SHOWN_CHARS = 240
"""Of one line, in an error text."""
MAX_FILE_BYTES = 256 * 1024
"""The log and one predecessor: a VM's directory is in memory on most hosts."""
_READ_BYTES = 16384
_BURST_BYTES = 512 * 1024
_PAUSE_S = 0.25
"""After a burst nothing is read for this long: a guest that floods its console waits, the host does not."""
_DRAIN_BYTES = 1 << 20


class _Channel:
    """One output of the guest: a socket whose other end is QEMU's."""

    def __init__(self, console: "Console", ours: socket.socket) -> None:
        self.tail = TextTail(max_lines=TAIL_LINES, on_line=console.write_line)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._left_bytes = _BURST_BYTES
        self._resume: asyncio.TimerHandle | None = None
        ours.setblocking(False)
        self._loop.add_reader(ours, self._readable)

    def _readable(self) -> None:
        self._left_bytes -= max(self._read(), 0)
        if self._left_bytes <= 0 and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._resume = self._loop.call_later(_PAUSE_S, self._resumed)

    def _resumed(self) -> None:
        self._left_bytes = _BURST_BYTES
        self._resume = None
        self._loop.add_reader(self._socket, self._readable)

    def _read(self) -> int:
        """Bytes read; 0 when there is nothing now or nothing more to come."""
        try:
            data = self._socket.recv(_READ_BYTES)
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
        """What is waiting has been read; for when QEMU has ended."""
        left_bytes = _DRAIN_BYTES
        while self._socket.fileno() >= 0 and left_bytes > 0:
            count = self._read()
            if count == 0:
                break
            left_bytes -= count
        self.tail.finish()

    def close(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()


class Console:
    """The guest's console and its serial port, as text. `close` ends it; the tails remain readable."""

    def __init__(self, *, log_path: str, to_log: bool) -> None:
        self._path = log_path
        self._to_log = to_log
        self._file_bytes = 0
        self._fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._channels: list[_Channel] = []

    def attach(self, ours: socket.socket) -> None:
        """The guest's output on `ours` is read from now on; the socket is the console's."""
        self._channels.append(_Channel(self, ours))

    def write_line(self, line: str) -> None:
        """For the channels: one finished line into the file, which starts anew when full (one old file is kept)."""
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
        """The last lines of the first channel that names a panic, else of the first that says anything."""
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
