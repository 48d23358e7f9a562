"""Programs that run beside the tests: a process, its log, its end. Containerd and CRI-O are two of them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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


class Program:
    """A program that runs beside the tests; what it says goes to `log`. In a `with` block it runs for the block."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Somebody else ended it."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """It answers."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        return True

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(
        self, argv: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=directory
            )
        eventually(self._answers, what=lambda: f"{self.name} answers; its log ends: {self.log_tail()}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} exited {self._process.returncode}: {self.log_tail()}")
        return self.is_ready()

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """It has ended: its wait status, None if it did not run. Its children stay: they do not depend on it."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)
        try:
            return process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.start()

    def log_tail(self, lines: int = 15) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"


class Daemon(Program):
    """containerd or CRI-O. `stop` leaves its tasks and their shims running, as a real restart does."""

    def __init__(self, name: str, directories: Directories) -> None:
        super().__init__(name, directories.log)
        self.directories = directories

    def is_ready(self) -> bool:
        return self.directories.socket.exists()

    def shim_log(self, since: int = 0) -> str:
        """The daemon's log after byte `since`; shims write theirs through it."""
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.log.stat().st_size
