"""The session's peer for the remote hypervisor, and shims' configuration that points at it.

What the peer makes lies below /run/peerpod, so a VM, a socket or a record that is left shows in the leak checks.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.remote.faults import Faults
from integration.remote.peer import saved

from . import processes, shim_config
from .images import IMAGE
from .networks import PodNetwork, pod_network
from .processes import Process
from .runtime import Runtime
from .waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
GUEST = PROJECT / ".build" / "guest"
GROUND = Path("/run/pyshim-integration")
DIRECTORY = Path("/run/peerpod")
MEMORY_MIB = 256
_MADE_ONCE = ("tls", "images.img", "faults")


@dataclass(slots=True, kw_only=True)
class RemotePeer:
    """A peer process on `DIRECTORY`; its VMs are QEMU processes that outlive it."""

    log: Path
    images: Path
    guest: Path = GUEST
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def socket(self) -> Path:
        return DIRECTORY / "hypervisor.sock"

    def start(self) -> None:
        """It answers."""
        DIRECTORY.mkdir(exist_ok=True, mode=0o700)
        self.socket.unlink(missing_ok=True)
        files = ("--images", str(self.images), "--guest", str(self.guest))
        command = [sys.executable, "-m", "integration.remote", "serve", *files]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        eventually(self._listens, what=lambda: f"the peer listens; its log ends: {self.log_tail()}", within_s=90)

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the peer exited {self._process.returncode}: {self.log_tail()}")
        return self.socket.exists()

    def end(self, number: int = signal.SIGTERM) -> None:
        """The peer is gone, its VMs are not."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        self._process.wait(60)
        self._process = None

    def wait_dead(self) -> None:
        """It has ended by itself."""
        assert self._process is not None
        self._process.wait(120)
        self._process = None

    @contextlib.contextmanager
    def faults(self, text: str) -> Iterator[None]:
        """`text` holds for every call of the block."""
        faults = Faults(DIRECTORY / "faults")
        faults.write(text)
        try:
            yield
        finally:
            faults.write("")

    def records(self) -> list[dict[str, Any]]:
        """The peer's records of its VMs."""
        return saved(DIRECTORY)

    def record(self, sandbox: str) -> dict[str, Any]:
        (found,) = [record for record in self.records() if record["id"] == sandbox]
        return found

    def vms(self) -> list[Process]:
        """The QEMU processes of all its VMs."""
        return processes.find("qemu-system-", "peerpod-config")

    def asked(self, method: str) -> int:
        """The number of calls of `method` since the log began."""
        return self.log.read_text(errors="replace").count(f"--> {method} ")

    def log_tail(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return "(no log)"

    def configuration(self, directory: Path = GROUND / "remote", **changes: object) -> Path:
        """The shipped remote configuration, for this peer, its small VMs and a busy machine."""
        directory.mkdir(exist_ok=True)
        wanted = {
            "remote_hypervisor_socket": str(self.socket),
            "default_memory": MEMORY_MIB,
            "create_container_timeout": 120,
            **changes,
        }
        return shim_config.variant(directory, shim_config.SHIPPED_REMOTE, **wanted)


@contextlib.contextmanager
def remote_peer(log: Path, images: Path, *, guest: Path = GUEST) -> Iterator[RemotePeer]:
    """A peer that is up; its VMs boot `guest`.

    At the end it is gone with what it makes once; what is left of VMs stays, to be seen.
    """
    peer = RemotePeer(log=log, images=images, guest=guest)
    try:
        peer.start()
        yield peer
    finally:
        peer.end()
        for name in _MADE_ONCE:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                shutil.rmtree(DIRECTORY / name)
            (DIRECTORY / name).unlink(missing_ok=True)
        for path in (DIRECTORY / "vms", DIRECTORY / "pods", DIRECTORY):
            with contextlib.suppress(OSError):
                path.rmdir()


@pytest.fixture(scope="module")
def peer(module_leaves_nothing: None) -> Iterator[RemotePeer]:
    """A file's peer. A VM that a test leaves to it fails that test's leak check."""
    with remote_peer(GROUND / "peer.log", GROUND / "busybox.tar") as made:
        yield made


@pytest.fixture(scope="module")
def remote_network(module_leaves_nothing: None) -> Iterator[PodNetwork]:
    """The namespace that pods' networks would be inspected in."""
    with pod_network("it-remote", subnet=31) as made:
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRun:
    """What `ctr run` says for a container in a VM of the peer's: what containerd's CRI would say of its pod."""

    runtime: Runtime
    peer: RemotePeer
    network: PodNetwork

    def __call__(
        self, pod: str, *more: str | Path, config: Path | None = None, detach: bool = False
    ) -> tuple[str | Path, ...]:
        """Words to be followed by the container's id and command; `more` are options."""
        annotations = {
            "io.kubernetes.cri.image-name": f"docker.io/{IMAGE}",
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.sandbox-namespace": "tests",
            "io.kubernetes.cri.sandbox-uid": f"uid-of-{pod}",
        }
        return (
            *("run", "--detach" if detach else "--rm", "--runtime", self.runtime.name),
            *("--runtime-config-path", config or self.peer.configuration()),
            *("--with-ns", f"network:{self.network.namespace}"),
            *(word for item in annotations.items() for word in ("--annotation", "=".join(item))),
            *(*more, IMAGE),
        )


@pytest.fixture(scope="module")
def remote_run(runtime: Runtime, peer: RemotePeer, remote_network: PodNetwork) -> RemoteRun:
    return RemoteRun(runtime=runtime, peer=peer, network=remote_network)
