"""Zygotes in the enclosure. The framework starts and ends them: shims are forked while one runs, and executed else.

By itself the first `start` would leave one behind. `keep_away` prevents that for all shims at once, whichever program
calls `start`: it holds the lock by which a `start` sees that another one's zygote is on its way up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pyshim.start import zygote as link

from . import processes
from .processes import Process
from .waiting import eventually

DIRECTORY = Path("/run/pyshim")
PATIENT = {"PYSHIM_ZYGOTE_WITHIN_S": "30"}
"""Makes `start` use a zygote that there is, however busy the machine is."""
_held: list[int] = []


def keep_away() -> None:
    """From now on no `start` leaves a zygote behind. One that runs is not touched."""
    if _held:
        return
    DIRECTORY.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(f"{link.address(str(DIRECTORY))}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
    else:
        _held.append(lock)


def let_come() -> None:
    """A zygote can be started, and the next `start` leaves one behind."""
    while _held:
        os.close(_held.pop())


@contextlib.contextmanager
def left_behind() -> Iterator[None]:
    """Within the block a `start` leaves a zygote behind; none is there afterwards."""
    let_come()
    try:
        yield
    finally:
        for process in launched():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: not launched(), what="the zygote has ended")
        keep_away()


def launched() -> list[Process]:
    """The zygotes that a `start` has started."""
    return [process for process in processes.find("-idle", "-directory") if process.command[-1] == "zygote"]


class Zygote:
    """The zygote that a unit of systemd would run, by the launcher `shim`; what it says goes to `log`."""

    def __init__(self, shim: Path, log: Path) -> None:
        self._command = (str(shim), "-idle", "0", "zygote")
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """It listens."""
        let_come()
        with self._log.open("wb") as log:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        self._process = process
        eventually(
            lambda: "zygote: ready" in self._log.read_text() or process.poll() is not None, what="the zygote is ready"
        )
        assert process.poll() is None, self._log.read_text()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It listens for the block; nothing is left of it afterwards."""
        try:
            self.start()
            yield
        finally:
            self.stop()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """It has ended, by itself when asked; no `start` leaves another."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(30)
            finally:
                self._process.kill()
                self._process.wait()
            self._process = None
        keep_away()
