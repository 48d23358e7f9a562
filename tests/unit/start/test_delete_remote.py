"""`delete` and `pyshim cleanup` of sandboxes whose VM is remote."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from delete_node import until

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.cleanup import orphans
from pyshim.cleanup.leftovers import undo_remains
from pyshim.cleanup.names import Places
from pyshim.cleanup.remote_vms import MARGIN_S, hold_s
from pyshim.host.processes import identity as processes
from pyshim.model.errors import NotFound
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.remote_vms import RemoteVmState, remote_vm_entry
from pyshim.node.cli import cleanup
from tests.fakes.left_node import DEADLINE_S, LeftNode, Process
from tests.fakes.remote_service import FakeRemoteService, when

SANDBOX = f"test-remote-{os.getpid()}"
WAIT_S = DEADLINE_S
IMPATIENT = (
    "leftovers.EXIT_WAIT_S = leftovers.TERM_WAIT_S = leftovers.WATCH_PAUSE_S = background.LONG_WAIT_S = 0.05; "
    "remote_vms.PAUSE_S = 0.05"
)
"""For a `delete` that waits in vain: here nothing that it waits for ends before the test says so."""
LOCKED = "leftovers.LOCK_WAIT_S = 0"
"""For a `delete` while another process has the lock: it tries once."""
UNTIL_IT_WAITS = "delete.DEADLINE_S = 3600"
"""For a `delete` that is to answer once its process says what it waits for, on a machine however busy."""
PATIENT = f"delete.DEADLINE_S = background.LONG_WAIT_S = {WAIT_S}"
"""For a `delete` that is to be done with everything before it answers, on a machine however busy."""


class Node(LeftNode):
    """One sandbox with a remote VM and a directory."""

    def __init__(self, root: Path, service: FakeRemoteService) -> None:
        super().__init__(root)
        self.service = service
        self.vm_dir = root / "sbs" / SANDBOX / "vm"
        self.vm_dir.mkdir(parents=True)
        self.bundle = root / "bundle"
        self.bundle.mkdir()

    def save(
        self,
        state: RemoteVmState = RemoteVmState.KNOWN,
        *,
        shim: Process | None = None,
        asked_until_s: float | None = None,
        stop_timeout_s: float = WAIT_S,
    ) -> None:
        remote = remote_vm_entry(
            SANDBOX,
            socket_path=self.service.path,
            state=state,
            asked_until_s=int(time.time()) + 3600 if asked_until_s is None else int(asked_until_s),
            stop_timeout_s=int(stop_timeout_s),
        )
        self.leave(SANDBOX, LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(self.vm_dir)), remote, shim=shim)

    def held(self) -> list[ResourceKind]:
        try:
            return [entry.kind for entry in self.store.load(SANDBOX).ledger]
        except NotFound:
            return []

    def is_forgotten(self) -> bool:
        return self.store.sandbox_ids() == () and self.store.entered_ids() == ()

    def sleeping_shim(self, code: str = "pass") -> Process:
        """A process that has executed `code`, and sleeps through SIGTERM."""
        program = f"import signal, time; signal.signal(15, lambda *_: None); {code}; print(flush=True)"
        return self.python(f"{program}; [time.sleep(1) for _ in range(600)]")

    def delete(self, *settings: str) -> Process:
        """As containerd runs it, with its four seconds; IMPATIENT and `settings` are statements to execute first."""
        words = self.delete_words(SANDBOX, self.bundle, IMPATIENT, *settings)
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def cleanup(self) -> int:
        places = Places(vm_root=f"{self.root}/v", shared_root=f"{self.root}/s", cgroup_root=f"{self.root}/c")
        node = cleanup.CleanupPlaces(store=self.store, places=places)
        code: int = cleanup.command.main([SANDBOX], obj=node, standalone_mode=False)
        return code


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with FakeRemoteService(str(tmp_path)) as service:
        service.vms[SANDBOX] = "running"
        node = Node(tmp_path, service)
        yield node
        node.end()


def finished(process: Process) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err.decode()


def test_a_killed_shims_vm_is_stopped_by_delete(node: Node) -> None:
    node.save()

    code, out, err = finished(node.delete(PATIENT))

    assert (code, err) == (0, "")
    assert DeleteResponse.FromString(out).exit_status == 137
    assert node.service.vms == {}
    assert node.is_forgotten()
    assert not node.vm_dir.exists()


def test_a_slow_end_goes_on_after_delete_has_answered(node: Node) -> None:
    """containerd does nothing else for the pod meanwhile; the service forgets the VM when the caller hangs up."""
    allowed = threading.Event()
    node.service.behave["StopVM"] = when(allowed)
    node.save()

    code, out, err = finished(node.delete(UNTIL_IT_WAITS))

    assert code == 0
    assert f"remote vm '{SANDBOX}': process " in err
    assert DeleteResponse.FromString(out).exit_status == 137
    assert not node.vm_dir.exists()
    assert node.held() == [ResourceKind.REMOTE_VM]
    pid = int(err.split("process ")[1].split()[0])
    assert processes.start_ticks(pid) is not None
    allowed.set()
    until(node.is_forgotten)
    assert node.service.vms == {}
    assert node.service.methods() == ["StopVM"]


def test_a_second_delete_leaves_the_end_to_the_one_that_began_it(node: Node) -> None:
    allowed = threading.Event()
    node.service.behave["StopVM"] = when(allowed)
    node.save()
    first = node.delete()
    node.service.called("StopVM")

    code, _, _ = finished(node.delete(LOCKED))

    assert code == 0
    assert finished(first)[0] == 0
    assert node.service.methods() == ["StopVM"]
    allowed.set()
    until(node.is_forgotten)


def test_cleanup_leaves_the_end_to_the_process_that_began_it(
    node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer may come by many times while a service deletes one VM."""
    monkeypatch.setattr(orphans, "ONE_SANDBOX_S", 0.1)
    allowed = threading.Event()
    node.service.behave["StopVM"] = when(allowed)
    node.save()
    assert finished(node.delete())[0] == 0
    node.service.called("StopVM")

    assert node.cleanup() == cleanup.IN_USE

    assert f"sandbox '{SANDBOX}': left alone: another process" in capsys.readouterr().out
    assert node.service.methods() == ["StopVM"]
    allowed.set()
    until(node.is_forgotten)


def test_what_delete_cannot_end_is_reported_and_kept_and_cleanup_ends_it(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.service.close()
    node.save()

    code, out, err = finished(node.delete(PATIENT))

    assert (code, DeleteResponse.FromString(out).exit_status) == (1, 137)
    assert f"release remote-vm '{SANDBOX}': remote hypervisor '{node.service.path}': No such file" in err
    assert node.held() == [ResourceKind.REMOTE_VM]
    assert node.cleanup() == cleanup.FAILED
    assert "No such file" in capsys.readouterr().err
    node.service.open()
    assert node.cleanup() == cleanup.CLEAN
    assert f"undone: remote-vm {SANDBOX}" in capsys.readouterr().out
    assert node.service.vms == {}
    assert node.is_forgotten()


def test_a_new_sandbox_of_the_id_does_not_begin_what_it_cannot_wait_for(node: Node) -> None:
    node.save()

    errors = undo_remains(node.store, SANDBOX, deadline=time.monotonic() + WAIT_S)

    assert errors == [f"release remote-vm '{SANDBOX}': its end may take minutes"]
    assert node.held() == [ResourceKind.REMOTE_VM]
    assert node.service.calls == []


def test_an_end_whose_process_died_is_taken_up_by_cleanup(node: Node) -> None:
    never = threading.Event()
    node.service.behave["StopVM"] = when(never)
    node.save()
    _, _, err = finished(node.delete())
    os.kill(int(err.split("process ")[1].split()[0]), signal.SIGKILL)

    del node.service.behave["StopVM"]
    never.set()
    until(lambda: node.cleanup() == cleanup.CLEAN)

    assert node.service.vms == {}
    assert node.is_forgotten()


def test_a_shim_that_ends_its_remote_vm_is_asked_to_end_and_then_waited_for(node: Node) -> None:
    """Killed, it would hang up on a service that is deleting the VM."""
    signalled = node.root / "signalled"
    shim = node.sleeping_shim(f"signal.signal(15, lambda *_: open({str(signalled)!r}, 'w').close())")
    node.save(shim=shim)

    code, _, err = finished(node.delete(UNTIL_IT_WAITS))

    assert code == 0
    assert f"remote vm '{SANDBOX}': process " in err
    assert f" waits for shim {shim.pid} to end it\n" in err
    until(signalled.exists)
    assert shim.poll() is None
    assert node.held() == [ResourceKind.DIRECTORY, ResourceKind.REMOTE_VM]
    assert node.service.calls == []
    again = finished(node.delete(LOCKED, UNTIL_IT_WAITS))
    assert (again[0], again[2]) == (0, f"remote vm '{SANDBOX}': shim {shim.pid} waits for its end\n")
    shim.kill()  # as if it had ended without having reached its service
    until(node.is_forgotten)
    assert node.service.methods() == ["StopVM"]
    assert node.service.vms == {}
    assert not node.vm_dir.exists()


@pytest.mark.parametrize("stop", [False, True], ids=["blocked", "stopped"])
def test_a_hung_shim_of_a_remote_vm_is_killed_when_no_call_of_it_can_be_under_way_and_its_vm_is_stopped(
    node: Node, stop: bool
) -> None:
    shim = node.sleeping_shim()
    if stop:
        shim.send_signal(signal.SIGSTOP)
    node.save(shim=shim, asked_until_s=0, stop_timeout_s=1)

    code, _, err = finished(node.delete("remote_vms.MARGIN_S = 0.0"))

    assert (code, f" waits for shim {shim.pid} to end it" in err) == (0, True)
    until(node.is_forgotten)
    assert shim.wait(WAIT_S) == -signal.SIGKILL
    assert node.service.vms == {}
    assert not node.vm_dir.exists()


def test_a_hung_shim_whose_remote_vm_was_stopped_is_killed_at_once(node: Node) -> None:
    shim = node.sleeping_shim()
    node.save(RemoteVmState.STOPPED, shim=shim)

    code, _, err = finished(node.delete(PATIENT))

    assert (code, err) == (0, "")
    assert shim.wait(WAIT_S) == -signal.SIGKILL
    assert node.is_forgotten()
    assert node.service.calls == []


def test_a_shim_that_hangs_after_its_remote_vm_was_stopped_is_not_waited_for_as_long_as_for_the_vm(node: Node) -> None:
    shim = node.sleeping_shim()
    node.save(shim=shim, stop_timeout_s=3600)
    assert finished(node.delete("leftovers.REST_S = 0.0"))[0] == 0
    assert shim.poll() is None

    node.save(RemoteVmState.STOPPED, shim=shim)

    assert shim.wait(WAIT_S) == -signal.SIGKILL
    until(node.is_forgotten)


@pytest.mark.parametrize(
    ("asked_in_s", "calls"),
    [(-1000, 1), (0, 1), (100, 1 + 1 / 6), (10**9, 2)],
    ids=["long ago", "now", "soon", "wrong"],
)
def test_a_shim_is_waited_for_as_long_as_its_calls_may_take(asked_in_s: int, calls: float) -> None:
    entry = remote_vm_entry(
        SANDBOX,
        socket_path="/s",
        state=RemoteVmState.KNOWN,
        asked_until_s=int(time.time()) + asked_in_s,
        stop_timeout_s=600,
    )

    assert hold_s(entry) == pytest.approx(calls * 600 + MARGIN_S, abs=30)
