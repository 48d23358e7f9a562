"""A zygote in the enclosure, as the unit of configs/systemd runs one: shims are then forked, not executed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

from .waiting import eventually

DIRECTORY = Path("/run/pyshim")
PATIENT = {"PYSHIM_ZYGOTE_WITHIN_S": "30"}
"""What makes `start` use a zygote that there is, however busy the machine is."""


class Zygote:
    """The zygote that `command` runs; what it says goes to `log`."""

    def __init__(self, command: Path, log: Path) -> None:
        self._command = (str(command), "zygote")
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def waiting(self, shims: Collection[int] = ()) -> list[int]:
        """Its forks that wait for a caller: all but the shims."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if pid not in shims]

    def start(self) -> None:
        """It listens."""
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
            self.close()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """It has ended, by itself when asked."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(30)
            finally:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """It has ended, and the file is gone that it keeps on a node for the next one."""
        try:
            self.stop()
        finally:
            for lock in DIRECTORY.glob("zygote-*.lock"):
                lock.unlink()
