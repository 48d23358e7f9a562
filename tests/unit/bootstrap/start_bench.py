"""A shim to be started: bundles, a private socket directory, and daemons that are gone after the test."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that has ended but that nobody has reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class StartBench:
    """Starts shims below `root`; `sockets` is their socket directory."""

    namespace = "k8s.io"
    containerd = "/run/containerd/containerd.sock"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sockets = root / "s"
        self.pids = root / "pids"
        self.pids.mkdir()

    def bundle(self, container_id: str, annotations: dict[str, str] | None = None) -> Path:
        path = self.root / container_id
        path.mkdir()
        os.mkfifo(path / "log")
        (path / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "annotations": annotations or {}}))
        return path

    def words(self, container_id: str, *extra: str) -> list[str]:
        flags = ["-namespace", self.namespace, "-address", self.containerd, "-publish-binary", "/usr/bin/containerd"]
        return [*flags, "-id", container_id, *extra, "start"]

    def popen(self, bundle: Path, words: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """`start` as a child; `shell` is run first by the process that becomes it."""
        daemon = options.pop("daemon", HERE / "fake_daemon.py")
        shell = options.pop("shell", "")
        command = [sys.executable, "-I", "-S", str(HERE / "start_driver.py"), str(REPOSITORY), str(self.sockets)]
        environment = {"FAKE_DAEMON_PIDS": str(self.pids), "TTRPC_ADDRESS": f"{self.containerd}.ttrpc"}
        settings: dict[str, Any] = {
            "cwd": bundle,
            "env": environment | options.pop("env", {}),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        return subprocess.Popen([*command, str(daemon), *words], **(settings | options))

    def start(
        self, bundle: Path, *extra: str, stdin: bytes = b"", **options: Any
    ) -> "subprocess.CompletedProcess[bytes]":
        process = self.popen(bundle, self.words(bundle.name, *extra), stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def daemons(self) -> list[int]:
        """Pids of every daemon that ever ran here."""
        return [int(path.name) for path in self.pids.iterdir()]

    def alive(self) -> list[int]:
        return [pid for pid in self.daemons() if is_alive(pid)]

    def ask(self, address: str) -> dict[str, Any]:
        """What the daemon behind `unix://…` says of itself."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(address.removeprefix("unix://"))
            data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        report: dict[str, Any] = json.loads(data)
        return report

    def nothing_left(self) -> bool:
        return not self.alive() and (not self.sockets.exists() or not list(self.sockets.iterdir()))

    def close(self) -> None:
        for pid in self.daemons():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
