"""What the daemon decides by itself: who may call it, and which sandbox it must not take over."""

import os
import socket
from pathlib import Path

import pytest

from pyshim.host import processes
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.serve import check_peer, refuse_living_namesake
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


def test_a_state_of_katas_own_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / SANDBOX).mkdir()
    (tmp_path / SANDBOX / "persist.json").write_text('{"PersistVersion": 2}')

    with pytest.raises(NotOurState):
        refuse_living_namesake(StateStore(root=str(tmp_path)), SANDBOX, shim(os.getpid()))
