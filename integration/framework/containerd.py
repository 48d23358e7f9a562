"""A private containerd: own root, state, socket and configuration; finds our shim first on its PATH."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import zygote
from .ctr import Ctr
from .waiting import eventually

_CONFIG = """\
version = 2
root = "{root}/root"
state = "{state}"
disabled_plugins = [{disabled}]
oom_score = 0

[grpc]
address = "{socket}"

[debug]
address = ""
level = "{log_level}"

[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"

{extra}
"""
# Either useless here, or they look for things this machine need not have and fill the log with warnings.
_NEVER_NEEDED = (
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)
_CRI = "io.containerd.grpc.v1.cri"


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


class Containerd:
    """One containerd daemon. `start` returns when it answers; `stop` leaves its tasks running, as a real restart
    does.
    """

    def __init__(
        self,
        directories: Directories,
        *,
        binaries: Path,
        cri: bool = False,
        extra_config: str = "",
        log_level: str = "debug",
    ) -> None:
        """`log_level` decides about the shims' debug lines too: containerd tells them."""
        self.directories = directories
        self._binaries = binaries
        self._cri = cri
        self._extra = extra_config
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self.ctr = Ctr(socket=directories.socket, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        path = f"{self._binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        # Nothing of the developer's shell: a proxy setting or a PYTHONPATH must not decide what is tested.
        return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **zygote.PATIENT}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        where = self.directories
        where.root.mkdir(parents=True, exist_ok=True)
        disabled = _NEVER_NEEDED if self._cri else (*_NEVER_NEEDED, _CRI)
        text = _CONFIG.format(
            root=where.root,
            state=where.state,
            socket=where.socket,
            disabled=", ".join(f'"{name}"' for name in disabled),
            extra=self._extra,
            log_level=self._log_level,
        )
        config = where.root / "config.toml"
        config.write_text(text)
        with where.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
            )
        eventually(self._answers, what=lambda: f"containerd answers; its log ends: {self.log_tail()}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"containerd exited {self._process.returncode}: {self.log_tail()}")
        return self.directories.socket.exists() and self.ctr("version", check=False).code == 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the daemon. Tasks and their shims stay: they belong to nobody but themselves."""
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
            return "\n".join(self.directories.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def shim_log(self, since: int = 0) -> str:
        """What containerd's log holds after byte `since`; shims write theirs through it."""
        with self.directories.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.directories.log.stat().st_size


def missing_programs(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name, path=os.defpath + ":/usr/sbin:/sbin") is None]


def remove_daemon_files(where: Directories) -> None:
    """What containerd itself keeps in its state directory while stopped; shims' things there stay and count."""
    for name in ("containerd.sock", "containerd.sock.ttrpc"):
        (where.state / name).unlink(missing_ok=True)
    empty = ("io.containerd.runtime.v1.linux", "io.containerd.runtime.v2.task/default", "io.containerd.runtime.v2.task")
    shutil.rmtree(where.state / "fifo", ignore_errors=True)
    for name in (*empty, "runc/default", "runc", "s", ""):
        with contextlib.suppress(FileNotFoundError):
            (where.state / name).rmdir()
