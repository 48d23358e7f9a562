"""A zygote in the enclosure, as the unit of configs/systemd runs one: shims are then forked, not executed.

PYSHIM_TEST_ZYGOTE=1 gives one to the whole suite.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

from .waiting import eventually

CHOICE = "PYSHIM_TEST_ZYGOTE"
DIRECTORY = Path("/run/pyshim")


def wanted() -> bool:
    """Whether the whole suite runs with forked shims."""
    return os.environ.get(CHOICE, "") not in ("", "0")


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

    def stop(self) -> None:
        """It has ended, by itself when asked."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            finally:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """It has ended, and its directory is gone."""
        try:
            self.stop()
        finally:
            shutil.rmtree(DIRECTORY, ignore_errors=True)
