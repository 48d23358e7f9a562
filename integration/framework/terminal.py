"""A program on a pseudo-terminal, typed at and read from."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence


class Terminal:
    """The master side. What the program wrote so far is kept in `seen`."""

    def __init__(self, pid: int, master: int) -> None:
        self.pid = pid
        self._master = master
        self.seen = b""
        self._status: int | None = None

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, argv: Sequence[str], environment: Mapping[str, str], *, rows: int, columns: int
    ) -> Iterator[Terminal]:
        pid, master = os.forkpty()
        if pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                os.execvpe(argv[0], list(argv), dict(environment))
            finally:
                os._exit(127)
        terminal = cls(pid, master)
        try:
            yield terminal
        finally:
            if terminal._status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(master)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size; the kernel tells the program with SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read_some(self, deadline: float) -> bool:
        """False at the end of output."""
        if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"nothing more on the terminal; seen {self.seen!r}")
        try:
            more = os.read(self._master, 65536)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            return False
        self.seen += more
        return bool(more)

    def read_until(self, text: str, within_s: float = 60.0) -> str:
        """The output up to and with `text`, taken out of `seen`."""
        deadline = time.monotonic() + within_s
        while (at := self.seen.find(text.encode())) < 0:
            if not self._read_some(deadline):
                raise AssertionError(f"the terminal ended before {text!r}; seen {self.seen!r}")
        end = at + len(text.encode())
        taken, self.seen = self.seen[:end], self.seen[end:]
        return taken.decode(errors="replace")

    def wait(self, within_s: float = 60.0) -> int:
        """The program's exit code (negative for a signal), all its output read."""
        deadline = time.monotonic() + within_s
        while self._read_some(deadline):
            pass
        _, status = os.waitpid(self.pid, 0)
        self._status = status
        return os.waitstatus_to_exitcode(status)
