"""Zygotes in the enclosure. The framework starts and ends them: shims are forked while one runs, and executed else.

By itself the first `start` would leave one behind. `keep_away` prevents that for all shims at once, whichever program
calls `start`: it holds the lock by which a `start` sees that another one's zygote is on its way up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from pyshim.start import zygote_client

from . import processes
from .daemon import Program
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
    lock = os.open(f"{zygote_client.address(str(DIRECTORY))}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


class Zygote(Program):
    """The zygote that a unit of systemd would run, by the launcher `shim`."""

    def __init__(self, shim: Path, log: Path) -> None:
        super().__init__("zygote", log)
        self._command = (str(shim), "-idle", "0", "zygote")

    def start(self) -> None:
        """It listens."""
        let_come()
        self.log.unlink(missing_ok=True)
        self._run(self._command, directory=Path("/"))

    def is_ready(self) -> bool:
        return "zygote: ready" in self.log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """It has ended, by itself when asked; no `start` leaves another."""
        try:
            status = super().stop(number)
            assert status != -signal.SIGKILL or number == signal.SIGKILL, "the zygote did not end when asked"
        finally:
            keep_away()
        return status
