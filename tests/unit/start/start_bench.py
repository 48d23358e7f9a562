"""A shim to be started: bundles, a private socket directory, and daemons that are gone after the test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


def is_alive(pid: int) -> bool:
    """True while the process runs; False for one that has ended and is not reaped."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestZygote:
    """A zygote in `directory`, up when this returns; what it says is in the file `log`."""

    __test__ = False

    def __init__(self, directory: Path, *, repository: Path = REPOSITORY, idle_s: float = 0, modules: str = "") -> None:
        self.directory = directory
        self.log = directory.parent / "zygote.log"
        driver = HERE / "zygote_driver.py"
        command = [sys.executable, "-I", "-S", driver, repository, directory, str(idle_s), modules]
        said_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._ready(said_before)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text()

    def _ready(self, said_before: int) -> None:
        deadline = time.monotonic() + 60
        while "ready" not in self.said[said_before:]:
            assert time.monotonic() < deadline, f"the zygote is not ready: {self.said}"
            time.sleep(0.005)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)


class StartBench:
    """Starts shims below `root`; `sockets` is their socket directory."""

    namespace = "k8s.io"
    containerd = "/run/containerd/containerd.sock"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sockets = root / "s"
        self.pids = root / "pids"
        self.pids.mkdir()
        self.repository = REPOSITORY
        self.zygote: TestZygote | None = None

    @property
    def zygote_dir(self) -> Path:
        return Path(f"{self.sockets}.z")

    def with_zygote(self, **options: Any) -> TestZygote:
        """From now on a zygote is there for every `start`."""
        self.zygote = TestZygote(self.zygote_dir, **options)
        return self.zygote

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
        """`start` as a child; `shell` is run first by the process that becomes it, `wrapper` is a program before it.

        `env` are more variables, and `without` names variables that it shall not have.
        """
        daemon = options.pop("daemon", HERE / "fake_daemon.py")
        shell = options.pop("shell", "")
        wrapper = options.pop("wrapper", [])
        command = [sys.executable, "-I", "-S", str(HERE / "start_driver.py"), str(self.repository), str(self.sockets)]
        environment = {"FAKE_DAEMON_PIDS": str(self.pids), "TTRPC_ADDRESS": f"{self.containerd}.ttrpc"}
        # The machine may be busy, and the daemon of these tests is no zygote that a `start` could leave behind.
        environment |= {"PYSHIM_ZYGOTE_WITHIN_S": "30"} if self.zygote is not None else {"PYSHIM_ZYGOTE": "off"}
        for name in options.pop("without", ()):
            environment.pop(name)
        settings: dict[str, Any] = {
            "cwd": bundle,
            "env": environment | options.pop("env", {}),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        return subprocess.Popen([*wrapper, *command, str(daemon), *words], **(settings | options))

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
        """The report of the daemon behind `unix://…`."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(address.removeprefix("unix://"))
            data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        report: dict[str, Any] = json.loads(data)
        return report

    def nothing_left(self) -> bool:
        return not self.alive() and (not self.sockets.exists() or not list(self.sockets.iterdir()))

    def close(self) -> None:
        if self.zygote is not None:
            self.zygote.close()
        for pid in self.daemons():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def report(bench: StartBench, container: str, **options: Any) -> dict[str, Any]:
    result = bench.start(bench.bundle(container), **options)
    assert (result.returncode, result.stderr) == (0, b"")
    return bench.ask(result.stdout.decode())


def is_forked(bench: StartBench, container: str, **options: Any) -> bool:
    assert bench.zygote is not None
    return bool(report(bench, container, **options)["parent"] == bench.zygote.pid)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
