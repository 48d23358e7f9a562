"""The ledger of one sandbox: intents on disk before their effect, struck out after it is gone."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state.records import STRIKE_OUT_WITHIN_S, SandboxRecords
from pyshim.state.store import StateStore
from tests.fakes.clock import run_fast_forward
from tests.unit.state.states import SHIM, container, snapshot


def mount(key: str) -> LedgerEntry:
    return LedgerEntry(kind=ResourceKind.MOUNT, key=key)


class Undo:
    """Records what it undoes; fails for given keys."""

    def __init__(self) -> None:
        self.undone: list[LedgerEntry] = []
        self.failing: set[str] = set()
        self.before: Callable[[], None] = lambda: None

    async def __call__(self, entry: LedgerEntry) -> None:
        self.before()
        await asyncio.sleep(0)
        if entry.key in self.failing:
            raise FailedPrecondition(f"release mount {entry.key!r}: busy")
        self.undone.append(entry)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(root=str(tmp_path / "sbs"))


@pytest.fixture
def undo() -> Undo:
    return Undo()


@pytest.fixture
def records(store: StateStore, undo: Undo) -> SandboxRecords:
    return SandboxRecords(store=store, sandbox_id=SandboxId("sb1"), shim=SHIM, undo=undo)


def on_disk(store: StateStore) -> list[str]:
    return [entry.key for entry in store.load("sb1").ledger]


def test_several_intents_are_on_disk_in_their_order_by_one_write(
    records: SandboxRecords, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.ledger.acquire(mount("/a"), mount("/b"))
    writes: list[list[str]] = []
    save = store.save
    monkeypatch.setattr(store, "save", lambda state: (save(state), writes.append(on_disk(store))))

    records.ledger.acquire(mount("/c"), mount("/b"), mount("/d"))

    assert writes == [["/a", "/b", "/c", "/d"]]


def test_an_exclusive_entry_is_acquired_alone(records: SandboxRecords) -> None:
    """More at once is refused, wherever among them it stands."""
    with pytest.raises(AssertionError):
        records.ledger.acquire(mount("/a"), LedgerEntry(kind=ResourceKind.VFIO, key="0000:00:01.0"))

    assert records.entries() == ()


def test_an_intent_is_on_disk_when_the_shim_is_killed_right_after(records: SandboxRecords, store: StateStore) -> None:
    pid = os.fork()
    if pid == 0:
        records.ledger.acquire(mount("/a"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    assert on_disk(store) == ["/a"]
    assert store.load("sb1").shim == SHIM


def test_an_intent_that_cannot_be_written_is_not_in_the_ledger(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))
    os.mkdir(f"{store.root}/sb1/.persist.json~")

    with pytest.raises(FailedPrecondition, match="write state"):
        records.ledger.acquire(mount("/b"), LedgerEntry(kind=ResourceKind.MOUNT, key="/a", detail={"beneath": "/"}))

    assert records.entries() == (mount("/a"),)
    assert on_disk(store) == ["/a"]


def test_a_resource_is_struck_out_only_after_it_is_gone(records: SandboxRecords, store: StateStore, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))
    seen: list[list[str]] = []
    undo.before = lambda: seen.append(on_disk(store))

    run_fast_forward(released(records, mount("/a")))

    assert seen == [["/a"]]
    assert on_disk(store) == []
    assert undo.undone == [mount("/a")]


async def released(records: SandboxRecords, *entries: LedgerEntry) -> None:
    """The entries are released, and the time has passed after which that is on disk."""
    for entry in entries:
        await records.ledger.release(entry)
    await asyncio.sleep(2 * STRIKE_OUT_WITHIN_S)


def counted(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ledger as each write from now on leaves it."""
    writes: list[list[str]] = []
    save = store.save
    monkeypatch.setattr(store, "save", lambda state: (save(state), writes.append(on_disk(store))))
    return writes


def test_strike_outs_share_one_write(
    records: SandboxRecords, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.ledger.acquire(*(mount(f"/{number}") for number in range(100)))
    writes = counted(store, monkeypatch)

    run_fast_forward(released(records, *(mount(f"/{number}") for number in range(1, 100))))

    assert writes == [["/0"]]


async def test_the_next_write_takes_strike_outs_along(
    records: SandboxRecords, store: StateStore, monkeypatch: pytest.MonkeyPatch, fast_clock: None
) -> None:
    records.ledger.acquire(mount("/a"), mount("/b"))
    writes = counted(store, monkeypatch)

    await records.ledger.release(mount("/a"))
    records.save(snapshot())
    await asyncio.sleep(2 * STRIKE_OUT_WITHIN_S)

    assert writes == [["/b"]]


async def test_a_stopped_remote_vm_is_struck_out_with_the_next_write(
    records: SandboxRecords, store: StateStore, monkeypatch: pytest.MonkeyPatch, fast_clock: None
) -> None:
    """Its entry says that nothing is left to be done."""
    vm = LedgerEntry(kind=ResourceKind.REMOTE_VM, key="sb1", detail={"state": "stopped"})
    records.ledger.acquire(mount("/a"), vm)
    writes = counted(store, monkeypatch)

    await records.ledger.release(vm)
    await records.ledger.release(mount("/a"))
    await asyncio.sleep(2 * STRIKE_OUT_WITHIN_S)

    assert writes == [[]]


def test_the_shims_end_between_undo_and_strike_out_leaves_the_entry_on_disk(
    records: SandboxRecords, store: StateStore, undo: Undo
) -> None:
    """The next undo of it finds nothing, which is success."""
    records.ledger.acquire(mount("/a"), mount("/b"))
    pid = os.fork()
    if pid == 0:

        async def body() -> None:
            await records.ledger.release(mount("/b"))
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(body())
    os.waitpid(pid, 0)

    assert on_disk(store) == ["/a", "/b"]


def test_an_exclusive_entry_is_struck_out_at_once(records: SandboxRecords, store: StateStore) -> None:
    function = LedgerEntry(kind=ResourceKind.VFIO, key="0000:00:01.0")
    records.save(snapshot())
    records.ledger.acquire(function)

    asyncio.run(records.ledger.release(function))

    assert on_disk(store) == []


async def test_strike_outs_are_on_disk_when_the_state_stays_at_the_end(
    records: SandboxRecords, store: StateStore
) -> None:
    records.ledger.acquire(mount("/a"), mount("/b"))

    await records.ledger.release(mount("/b"))
    records.remove()

    assert on_disk(store) == ["/a"]


async def test_no_strike_out_is_written_after_the_end(
    records: SandboxRecords, store: StateStore, fast_clock: None
) -> None:
    records.ledger.acquire(mount("/a"))

    await records.ledger.release(mount("/a"))
    records.remove()
    await asyncio.sleep(2 * STRIKE_OUT_WITHIN_S)

    assert store.sandbox_ids() == ()


def test_releasing_twice_undoes_once(records: SandboxRecords, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))

    asyncio.run(records.ledger.release(mount("/a")))
    asyncio.run(records.ledger.release(mount("/a")))

    assert len(undo.undone) == 1


def test_an_entry_whose_undo_failed_stays(records: SandboxRecords, store: StateStore, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))
    undo.failing = {"/a"}

    with pytest.raises(FailedPrecondition, match="busy"):
        asyncio.run(records.ledger.release(mount("/a")))

    assert on_disk(store) == ["/a"]


def test_later_details_replace_the_intent_in_place(records: SandboxRecords, store: StateStore, undo: Undo) -> None:
    intent = LedgerEntry(kind=ResourceKind.PROCESS, key="/run/vc/vm/x")
    known = LedgerEntry(kind=ResourceKind.PROCESS, key="/run/vc/vm/x", detail={"pid": 5, "start_ticks": 6})
    records.ledger.acquire(intent)
    records.ledger.acquire(mount("/a"))

    records.ledger.acquire(known)

    assert store.load("sb1").ledger == (known, mount("/a"))
    asyncio.run(records.ledger.release(intent))
    assert undo.undone == [known]


def test_the_same_key_of_another_kind_is_another_resource(records: SandboxRecords) -> None:
    records.ledger.acquire(mount("/a"))
    records.ledger.acquire(LedgerEntry(kind=ResourceKind.DIRECTORY, key="/a"))

    asyncio.run(records.ledger.release(mount("/a")))

    assert [entry.kind for entry in records.entries()] == [ResourceKind.DIRECTORY]


def test_a_strike_out_that_cannot_be_written_does_not_fail_the_release(
    records: SandboxRecords, store: StateStore, undo: Undo
) -> None:
    records.ledger.acquire(mount("/a"))
    os.mkdir(f"{store.root}/sb1/.persist.json~")

    run_fast_forward(released(records, mount("/a")))

    assert records.entries() == ()
    assert on_disk(store) == ["/a"]


def test_ledger_and_snapshot_keep_each_other(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))

    records.save(snapshot(container("c1")))
    records.ledger.acquire(mount("/b"))

    found = store.load("sb1")
    assert found.snapshot is not None
    assert found.snapshot.containers == (container("c1"),)
    assert [entry.key for entry in found.ledger] == ["/a", "/b"]


def test_nothing_is_written_after_the_end(records: SandboxRecords, store: StateStore) -> None:
    records.save(snapshot())

    records.remove()
    records.remove()
    records.save(snapshot())

    assert store.sandbox_ids() == ()
    with pytest.raises(FailedPrecondition, match="was removed"):
        records.ledger.acquire(mount("/late"))
    assert records.entries() == ()


def test_a_state_directory_that_cannot_be_removed_does_not_fail_the_end_of_its_sandbox(
    records: SandboxRecords, store: StateStore, tmp_path: Path
) -> None:
    records.save(snapshot())
    Path(f"{store.root}/sb1/link-to-a-directory").symlink_to(tmp_path)

    records.remove()

    assert tmp_path.is_dir()
    assert not Path(f"{store.root}/sb1/persist.json").exists()


def test_remove_leaves_the_state_while_the_ledger_has_entries(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))

    records.remove()

    assert on_disk(store) == ["/a"]
