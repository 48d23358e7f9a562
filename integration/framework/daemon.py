"""What a private containerd and a private CRI-O have in common: a process, its log, an end that leaves the shims."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .waiting import eventually


@dataclass(frozen=True, slots=True, kw_only=True)
class Directories:
    """Where one containerd lives. `state` is containerd's own default, so that the shim meets the real paths."""

    root: Path
    state: Path

    @property
    def socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def log(self) -> Path:
        return self.root / "containerd.log"

    def bundle(self, container: str, namespace: str = "default") -> Path:
        return self.state / "io.containerd.runtime.v2.task" / namespace / container


class Daemon:
    """One daemon. `stop` leaves its tasks running, as a real restart does."""

    name: str

    def __init__(self, directories: Directories) -> None:
        self.directories = directories
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """It answers."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        return self.directories.socket.exists()

    def _run(self, argv: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        with self.directories.log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        eventually(self._answers, what=lambda: f"{self.name} answers; its log ends: {self.log_tail()}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} exited {self._process.returncode}: {self.log_tail()}")
        return self.is_ready()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the daemon. Tasks and their shims stay: they do not depend on it."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.start()

    def log_tail(self, lines: int = 15) -> str:
        try:
            return "\n".join(self.shim_log().splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def shim_log(self, since: int = 0) -> str:
        """The daemon's log after byte `since`; shims write theirs through it."""
        with self.directories.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.directories.log.stat().st_size
