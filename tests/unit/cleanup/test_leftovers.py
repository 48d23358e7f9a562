"""A new sandbox whose id an earlier one had: running, dead, damaged or another runtime's."""

import os
from pathlib import Path

import pytest

from pyshim.cleanup.leftovers import clear_remains, refuse_running_namesake
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state.schema import NotOurState, SandboxState, ShimRecord
from pyshim.state.store import StateStore

SANDBOX = SandboxId("demo")


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
        refuse_running_namesake(store, SANDBOX, shim(os.getpid()))


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(shim(os.getppid(), start_ticks=1), id="dead, its pid another's now"),
        pytest.param(shim(os.getpid()), id="ourselves, a create that failed before"),
    ],
)
def test_a_sandbox_that_no_other_shim_runs_can_be_made(owner: ShimRecord, tmp_path: Path) -> None:
    refuse_running_namesake(store_with(tmp_path, owner), SANDBOX, shim(os.getpid()))


def test_a_sandbox_without_a_state_or_with_a_damaged_one_can_be_made(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path))
    refuse_running_namesake(store, SANDBOX, shim(os.getpid()))
    (tmp_path / SANDBOX).mkdir()
    (tmp_path / SANDBOX / "persist.json").write_text('{"half')

    refuse_running_namesake(store, SANDBOX, shim(os.getpid()))


def test_what_a_dead_shim_left_is_undone_before_its_record_is_overwritten(tmp_path: Path) -> None:
    """A task of the same id is made anew after its shim was killed and `delete` was not called."""
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    left = tmp_path / "sbs" / SANDBOX / "vm"
    left.mkdir(parents=True)
    ledger = (LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(left)),)
    store.save(SandboxState(sandbox_id=SANDBOX, shim=shim(os.getppid(), 1), snapshot=None, ledger=ledger))
    store.enter(SANDBOX, shim(os.getppid(), 1))

    clear_remains(store, SANDBOX)

    assert not left.exists()
    assert not store.has_record(SANDBOX)
    clear_remains(store, SANDBOX)


def test_a_sandbox_is_not_made_over_remains_that_cannot_be_undone(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path / "sbs"))
    obstacle = tmp_path / "sbs" / SANDBOX / "in-the-way"
    obstacle.mkdir(parents=True)
    stuck = LedgerEntry(kind=ResourceKind.SOCKET, key=str(obstacle))
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
        refuse_running_namesake(store, SANDBOX, shim(os.getpid()))


def test_a_state_of_katas_own_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / SANDBOX).mkdir()
    (tmp_path / SANDBOX / "persist.json").write_text('{"PersistVersion": 2}')

    with pytest.raises(NotOurState):
        refuse_running_namesake(StateStore(root=str(tmp_path)), SANDBOX, shim(os.getpid()))
