"""A node with what a shim left on it: processes, directories, a socket, a state."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.cleanup import delete
from pyshim.cleanup.background import Outcome, Work
from pyshim.host.processes import identity as processes
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.start.argv import Invocation
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore, _sealed

PROJECT = Path(__file__).parents[3]
SANDBOX = f"test-sandbox-{os.getpid()}"
DEADLINE_S = 60.0
"""Far more than containerd's: the machine may be busy, and what is tested is what happens, not how soon."""


class Node:
    """A bundle, a state directory, and processes that stand for daemons and VMMs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bundle = root / "bundle"
        (self.bundle / "rootfs").mkdir(parents=True)
        self.register = str(root / "register")
        self.store = StateStore(root=str(root / "sbs"), register=self.register)
        self.socket = f"{root}/shim.sock"
        self.errors: list[str] = []
        self.own = Path(self.store.root, SANDBOX)
        """Where an entry of the ledger may be the sandbox's."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def process(self, code: str = "time.sleep(600)", key: str = "") -> "subprocess.Popen[bytes]":
        """A running process that has executed all of `code` up to its first wait."""
        program = f"import signal, time; print(flush=True); {code}"
        # Every program of a sandbox has its id in its command line.
        argv = [sys.executable, "-I", "-S", "-c", program, key, SANDBOX]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def program(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """A running process whose executable has that name; it waits for its stdin to end."""
        path = self.root / "programs" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            shutil.copy(shutil.which("cat") or "/bin/cat", path)
        # `cat -` ignores what it cannot open, and says so; the words are there all the same.
        process = subprocess.Popen(
            [path, "--", "-", *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._processes.append(process)
        deadline = time.monotonic() + DEADLINE_S
        while arguments[-1] not in processes.arguments(process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)  # the kernel shows the new command line a moment later
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def shim(self, daemon: "subprocess.Popen[bytes] | None") -> ShimRecord:
        pid, ticks = 2**22 + 1, 0
        if daemon is not None:
            pid, ticks = daemon.pid, processes.start_ticks(daemon.pid) or 0
        return ShimRecord(pid=pid, start_ticks=ticks, socket=f"unix://{self.socket}", namespace="k8s.io")

    def save(
        self,
        *ledger: LedgerEntry,
        daemon: "subprocess.Popen[bytes] | None" = None,
        vmm_pid: int = 77,
        containers: tuple[ContainerSnapshot, ...] = (),
        planned: bool = True,
    ) -> None:
        snapshot = SandboxSnapshot(
            sandbox_id=SandboxId(SANDBOX),
            status=SandboxStatus.RUNNING,
            config_source="",
            hypervisor_type="qemu",
            hypervisor={},
            hypervisor_config={},
            vmm_pid=vmm_pid,
            agent_address="",
            netns_path="",
            sizing={},
            containers=containers,
            failure="",
        )
        self.store.save(
            SandboxState(
                sandbox_id=SandboxId(SANDBOX),
                shim=self.shim(daemon),
                snapshot=snapshot if planned else None,
                ledger=ledger,
            )
        )

    def state_file(self) -> Path:
        return Path(f"{self.store.root}/{SANDBOX}/persist.json")

    def rewrite(self, old: str, new: str) -> None:
        """The state says `new` instead of `old`, and its checksum is right."""
        body = self.state_file().read_text().rpartition(',"Checksum"')[0]
        assert old in body
        self.state_file().write_bytes(_sealed(body.replace(old, new).encode()))

    def delete(
        self, container_id: str = SANDBOX, *, namespace: str = "k8s.io", address: str = "/run/c.sock"
    ) -> DeleteResponse:
        call = Invocation()
        call.id, call.bundle, call.namespace, call.address = container_id, str(self.bundle), namespace, address
        answer = delete.delete(
            call,
            state_root=self.store.root,
            register=self.register,
            deadline=time.monotonic() + DEADLINE_S,
            errors=self.errors,
            carry_out=carried_out_here,
        )
        return DeleteResponse.FromString(answer)


def carried_out_here(work: Work, action: str, deadline: float) -> Outcome:
    """In the test's own process, which has threads."""
    outcome = Outcome()
    work(outcome.take)
    return outcome


def directory(path: Path) -> LedgerEntry:
    path.mkdir(parents=True)
    (path / "file").touch()
    return LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(path))


def running(process: "subprocess.Popen[bytes]") -> LedgerEntry:
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    program = processes.executable(processes.ProcessRef(process.pid, ticks))
    detail = {"program": program, "pid": process.pid, "start_ticks": ticks}
    return LedgerEntry(kind=ResourceKind.PROCESS, key="/run/vc/vm/x/qemu", detail=detail)


def until(holds: Callable[[], bool]) -> None:
    """`holds()` is true: what another process does has been done."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
