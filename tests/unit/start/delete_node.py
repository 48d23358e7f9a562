"""A node with the sandbox that a test of `delete` removes."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.cleanup import delete
from pyshim.cleanup.background import Outcome, Work
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry
from pyshim.model.sandbox import ContainerSnapshot
from pyshim.start.invocation import Invocation
from pyshim.state.store import _sealed
from tests.fakes.left_node import DEADLINE_S, LeftNode, Process
from tests.unit.state import states

PROJECT = Path(__file__).parents[3]
SANDBOX = f"test-sandbox-{os.getpid()}"


class Node(LeftNode):
    """A bundle, the sandbox's state, and processes that stand for daemons and VMMs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bundle = root / "bundle"
        (self.bundle / "rootfs").mkdir(parents=True)
        self.errors: list[str] = []
        self.own = Path(self.store.root, SANDBOX)
        """Where an entry of the ledger may be the sandbox's."""

    def process(self, code: str = "time.sleep(600)", key: str = "") -> Process:
        """A running process that has executed all of `code` up to its first wait."""
        # Every program of a sandbox has its id in its command line.
        return self.python(f"import signal, time; print(flush=True); {code}", key, SANDBOX)

    def save(
        self,
        *ledger: LedgerEntry,
        daemon: Process | None = None,
        vmm_pid: int = 77,
        containers: tuple[ContainerSnapshot, ...] = (),
        planned: bool = True,
    ) -> None:
        snapshot = (
            replace(states.snapshot(*containers), sandbox_id=SandboxId(SANDBOX), vmm_pid=vmm_pid) if planned else None
        )
        self.leave(SANDBOX, *ledger, shim=daemon, snapshot=snapshot, is_registered=False)

    def state_file(self) -> Path:
        return self.file_of(SANDBOX)

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


def until(holds: Callable[[], bool]) -> None:
    """`holds()` is true: what another process does has been done."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
