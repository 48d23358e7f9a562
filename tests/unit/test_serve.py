"""What the daemon decides by itself: who may call it, and which sandbox it must not take over."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

import pyshim.serve
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.task import Identity
from pyshim.serve import check_peer, clear_remains, refuse_living_namesake
from pyshim.state.schema import NotOurState, SandboxState, ShimRecord
from pyshim.state.store import StateStore

SANDBOX = SandboxId("demo")


def test_a_peer_of_our_own_user_and_group_is_accepted() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_peer(ours)


@pytest.mark.parametrize("of_ours", ["geteuid", "getegid"])
def test_a_peer_of_another_user_or_group_is_refused(of_ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    another = getattr(os, of_ours)() + 1
    monkeypatch.setattr(os, of_ours, lambda: another)

    with ours, theirs, pytest.raises(PermissionError, match=f"pid {os.getpid()}: uid .* is not ours"):
        check_peer(ours)


def test_a_daemon_that_fails_before_it_serves_leaves_no_socket_to_wait_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> HostFacts:
        raise OSError("this host cannot be probed")

    monkeypatch.setattr(pyshim.serve, "probe_host", broken)
    path = tmp_path / "shim.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    identity = Identity(
        namespace="default",
        sandbox_id="demo",
        containerd_address="",
        containerd_ttrpc_address=str(tmp_path / "nobody"),
        publish_binary="",
        bundle=HostPath(str(tmp_path)),
        debug=False,
    )

    with listener, pytest.raises(OSError, match="cannot be probed"):
        asyncio.run(pyshim.serve._Daemon(identity, forked=False).run(listener))

    assert not path.exists()


def shim(pid: int, start_ticks: int | None = None) -> ShimRecord:
    ticks = start_ticks if start_ticks is not None else processes.start_ticks(pid)
    assert ticks is not None
    return ShimRecord(pid=pid, start_ticks=ticks, socket="unix:///run/s/abc", namespace="other")


def store_with(root: Path, owner: ShimRecord) -> StateStore:
    store = StateStore(root=str(root))
    store.save(SandboxState(sandbox_id=SANDBOX, shim=owner, snapshot=None, ledger=()))
    return store


def test_a_sandbox_that_another_living_shim_runs_is_not_taken_over(tmp_path: Path) -> None:
    store = store_with(tmp_path, shim(os.getppid()))

    with pytest.raises(FailedPrecondition, match=f"'demo': the shim of pid {os.getppid()} in namespace 'other' has"):
        refuse_living_namesake(store, SANDBOX, shim(os.getpid()))


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(shim(os.getppid(), start_ticks=1), id="dead, its pid another's now"),
        pytest.param(shim(os.getpid()), id="ourselves, a create that failed before"),
    ],
)
def test_a_sandbox_nobody_else_runs_can_be_made(owner: ShimRecord, tmp_path: Path) -> None:
    refuse_living_namesake(store_with(tmp_path, owner), SANDBOX, shim(os.getpid()))


def test_a_sandbox_without_a_state_or_with_a_damaged_one_can_be_made(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path))
    refuse_living_namesake(store, SANDBOX, shim(os.getpid()))
    (tmp_path / SANDBOX).mkdir()
    (tmp_path / SANDBOX / "persist.json").write_text('{"half')

    refuse_living_namesake(store, SANDBOX, shim(os.getpid()))


def test_what_a_dead_shim_left_is_undone_before_its_record_is_overwritten(tmp_path: Path) -> None:
    """A task of the same id is made anew after its shim was killed and nobody called `delete`."""
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    left = tmp_path / "vm"
    left.mkdir()
    ledger = (LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(left)),)
    store.save(SandboxState(sandbox_id=SANDBOX, shim=shim(os.getppid(), 1), snapshot=None, ledger=ledger))
    store.enter(SANDBOX, shim(os.getppid(), 1))

    clear_remains(store, SANDBOX)

    assert not left.exists()
    assert not store.knows(SANDBOX)
    clear_remains(store, SANDBOX)


def test_a_sandbox_is_not_made_over_remains_that_cannot_be_undone(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path / "sbs"))
    (tmp_path / "in-the-way").mkdir()
    stuck = LedgerEntry(kind=ResourceKind.SOCKET, key=str(tmp_path / "in-the-way"))
    store.save(SandboxState(sandbox_id=SANDBOX, shim=shim(os.getppid(), 1), snapshot=None, ledger=(stuck,)))

    with pytest.raises(FailedPrecondition, match=r"'demo': an earlier shim left .*in-the-way.*pyshim cleanup demo"):
        clear_remains(store, SANDBOX)

    assert store.load(SANDBOX).ledger == (stuck,)


@pytest.mark.parametrize("body", [None, '{"half'], ids=["lost", "damaged"])
def test_a_living_shim_is_known_by_the_register_when_its_state_is_not_readable(
    tmp_path: Path, body: str | None
) -> None:
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    store.enter(SANDBOX, shim(os.getppid()))
    if body is not None:
        (tmp_path / "sbs" / SANDBOX).mkdir(parents=True)
        (tmp_path / "sbs" / SANDBOX / "persist.json").write_text(body)

    with pytest.raises(FailedPrecondition, match=f"the shim of pid {os.getppid()}"):
        refuse_living_namesake(store, SANDBOX, shim(os.getpid()))


def test_a_state_of_katas_own_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / SANDBOX).mkdir()
    (tmp_path / SANDBOX / "persist.json").write_text('{"PersistVersion": 2}')

    with pytest.raises(NotOurState):
        refuse_living_namesake(StateStore(root=str(tmp_path)), SANDBOX, shim(os.getpid()))
