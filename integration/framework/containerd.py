"""A private containerd: own root, state, socket and configuration; finds our shim first on its PATH."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from . import releases, zygote
from .ctr import Ctr
from .daemon import Daemon, Directories

_CONFIG = """\
version = {version}
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
DEBIAN = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
"""
"""The settings of Debian 12's /etc/containerd/config.toml that concern the CRI plugin."""
# Either useless here, or they look for things this machine need not have and fill the log with warnings.
_NEVER_NEEDED = (
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)


class Containerd(Daemon):
    def __init__(
        self,
        directories: Directories,
        *,
        binaries: Path,
        cri: bool = False,
        extra_config: str = "",
        log_level: str = "debug",
        release: releases.Release | None = None,
    ) -> None:
        """`release` is the chosen one unless given, and `extra_config` is written for it. `log_level` decides about the
        shims' debug lines too: containerd tells them.
        """
        super().__init__("containerd", directories)
        self._binaries = binaries
        self._cri = cri
        self._extra = extra_config
        self._log_level = log_level
        self.release = release or releases.chosen()
        self.ctr = Ctr(
            program=self.release.programs / "ctr", socket=directories.socket, environment=self._environment()
        )

    def _environment(self) -> dict[str, str]:
        path = f"{self._binaries}:{self.release.programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        # Nothing of the developer's shell: a proxy setting or a PYTHONPATH must not decide what is tested.
        environment = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **zygote.PATIENT}
        # `ctr` of 2.x says on standard error that cgroup v1 will go.
        return environment | {"CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS": "1"}

    def start(self) -> None:
        zygote.keep_away()
        where = self.directories
        where.root.mkdir(parents=True, exist_ok=True)
        disabled = _NEVER_NEEDED if self._cri else (*_NEVER_NEEDED, *self.release.cri_plugins)
        text = _CONFIG.format(
            version=self.release.config_version,
            root=where.root,
            state=where.state,
            socket=where.socket,
            disabled=", ".join(f'"{name}"' for name in disabled),
            extra=self._extra,
            log_level=self._log_level,
        )
        config = where.root / "config.toml"
        config.write_text(text)
        self._run([self.release.programs / "containerd", "--config", config], environment=self._environment())

    @contextlib.contextmanager
    def with_settings(self, text: str) -> Iterator[None]:
        """Restarted with further lines of its configuration, until the end of the block."""
        before = self._extra
        self._extra += text
        self.restart()
        try:
            yield
        finally:
            self._extra = before
            self.restart()

    def is_ready(self) -> bool:
        return super().is_ready() and self.ctr("version", check=False).code == 0


def missing_programs(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name, path=os.defpath + ":/usr/sbin:/sbin") is None]


def remove_daemon_files(where: Directories) -> None:
    """The files that containerd leaves in its state directory are gone; those of shims stay and count."""
    for name in ("containerd.sock", "containerd.sock.ttrpc"):
        (where.state / name).unlink(missing_ok=True)
    for name in ("fifo", "io.containerd.mount-manager.v1.bolt"):
        shutil.rmtree(where.state / name, ignore_errors=True)
    for directory in sorted((path for path in where.state.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()
    with contextlib.suppress(OSError):
        where.state.rmdir()
