"""A node with what shims have left on it: states, the register, and processes that stand for the shims' programs."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from pyshim.host.processes import identity as processes
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.node.install.launcher import import_paths
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore

DEADLINE_S = 60.0
"""Far more than containerd's: the machine may be busy, and what is tested is what happens, not how soon."""
Process = subprocess.Popen[bytes]


class LeftNode:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.register = f"{root}/register"
        self.socket = f"{root}/shim.sock"
        self.store = StateStore(root=f"{root}/sbs", register=self.register)
        self.running: list[Process] = []

    def python(self, code: str, *words: str) -> Process:
        """A process that has executed `code` up to its first line of output."""
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, *words], stdout=subprocess.PIPE)
        self.running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def program(self, name: str, *words: str) -> Process:
        """A running process whose executable has that name; it waits for its stdin to end."""
        path = self.copy_of("cat", name)
        # `cat -` ignores what it cannot open, and says so; the words are there all the same.
        process = subprocess.Popen(
            [path, "--", "-", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.running.append(process)
        until_it_shows(process.pid, words[-1] if words else "-")
        return process

    def copy_of(self, program: str, name: str) -> Path:
        """An executable of that name."""
        path = self.root / "programs" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            shutil.copy(shutil.which(program) or f"/bin/{program}", path)
        return path

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()

    def shim(self, process: Process | None) -> ShimRecord:
        """The record of the shim that `process` stands for; None is one that has ended."""
        pid, ticks = (2**22 + 1, 0) if process is None else (process.pid, processes.start_ticks(process.pid) or 0)
        return ShimRecord(pid=pid, start_ticks=ticks, socket=f"unix://{self.socket}", namespace="k8s.io")

    def leave(
        self,
        sandbox_id: str,
        *ledger: LedgerEntry,
        shim: Process | None = None,
        snapshot: SandboxSnapshot | None = None,
        is_registered: bool = True,
    ) -> None:
        record = self.shim(shim)
        if is_registered:
            self.store.enter(sandbox_id, record)
        self.store.save(SandboxState(sandbox_id=SandboxId(sandbox_id), shim=record, snapshot=snapshot, ledger=ledger))

    def file_of(self, sandbox_id: str) -> Path:
        return Path(f"{self.store.root}/{sandbox_id}/persist.json")

    def delete_words(self, sandbox_id: str, bundle: Path, *settings: str) -> list[str]:
        """The launcher's `delete`; `settings` are statements that it executes first."""
        program = (
            f"import sys, time; sys.path += {list(import_paths())!r}; "
            "from pyshim.cleanup import background, delete, leftovers, remote_vms; "
            f"{''.join(f'{each}; ' for each in settings)}from pyshim.start.invocation import parse; "
            f"sys.exit(delete.main(parse(sys.argv[1:]), state_root={self.store.root!r}, register={self.register!r}))"
        )
        words = ["-namespace", "k8s.io", "-address", "/run/c.sock", "-id", sandbox_id, "-bundle", str(bundle), "delete"]
        return [sys.executable, "-I", "-S", "-c", program, *words]


def directory(path: Path) -> LedgerEntry:
    path.mkdir(parents=True)
    (path / "file").touch()
    return LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(path))


def running(process: Process, key: str = "/run/vc/vm/x/qemu") -> LedgerEntry:
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    program = processes.executable(processes.ProcessRef(process.pid, ticks))
    detail = {"program": program, "pid": process.pid, "start_ticks": ticks}
    return LedgerEntry(kind=ResourceKind.PROCESS, key=key, detail=detail)


def until_it_shows(pid: int, word: str) -> None:
    """The kernel shows a new program's command line a moment after its start."""
    deadline = time.monotonic() + DEADLINE_S
    while word not in processes.arguments(pid) and time.monotonic() < deadline:
        time.sleep(0.005)
