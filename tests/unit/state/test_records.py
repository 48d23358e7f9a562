"""What one sandbox holds: intents on disk before their effect, struck out after it is gone."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from states import SHIM, container, snapshot

from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state.records import SandboxRecords
from pyshim.state.store import StateStore


def mount(key: str) -> LedgerEntry:
    return LedgerEntry(kind=ResourceKind.MOUNT, key=key)


class Undo:
    """Records what it undoes; fails for the keys it is told to."""

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
    return SandboxRecords(store=store, sandbox_id=SandboxId("sb1"), shim=SHIM, release=undo)


def on_disk(store: StateStore) -> list[str]:
    return [entry.key for entry in store.load("sb1").ledger]


def test_an_intent_is_on_disk_before_anybody_acts_on_it(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))
    records.ledger.acquire(mount("/b"))

    assert on_disk(store) == ["/a", "/b"]


def test_several_intents_are_on_disk_in_their_order_by_one_write(
    records: SandboxRecords, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.ledger.acquire(mount("/a"), mount("/b"))
    writes: list[list[str]] = []
    save = store.save
    monkeypatch.setattr(store, "save", lambda state: (save(state), writes.append(on_disk(store))))

    records.ledger.acquire(mount("/c"), mount("/b"), mount("/d"))

    assert writes == [["/a", "/b", "/c", "/d"]]


def test_what_nobody_else_may_have_comes_alone(records: SandboxRecords) -> None:
    """Whoever asks for more at once is told so, wherever among them it stands."""
    with pytest.raises(AssertionError):
        records.ledger.acquire(mount("/a"), LedgerEntry(kind=ResourceKind.VFIO, key="0000:00:01.0"))

    assert records.ledger.entries() == ()


def test_an_intent_is_on_disk_when_the_shim_is_killed_right_after(records: SandboxRecords, store: StateStore) -> None:
    pid = os.fork()
    if pid == 0:
        records.ledger.acquire(mount("/a"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    assert on_disk(store) == ["/a"]
    assert store.load("sb1").shim == SHIM


def test_an_intent_that_cannot_be_written_is_not_held(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))
    os.mkdir(f"{store.root}/sb1/.persist.json~")

    with pytest.raises(FailedPrecondition, match="write state"):
        records.ledger.acquire(mount("/b"), LedgerEntry(kind=ResourceKind.MOUNT, key="/a", detail={"beneath": "/"}))

    assert records.ledger.entries() == (mount("/a"),)
    assert on_disk(store) == ["/a"]


def test_a_resource_is_struck_out_only_after_it_is_gone(records: SandboxRecords, store: StateStore, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))
    seen: list[list[str]] = []
    undo.before = lambda: seen.append(on_disk(store))

    asyncio.run(records.ledger.release(mount("/a")))

    assert seen == [["/a"]]
    assert on_disk(store) == []
    assert undo.undone == [mount("/a")]


def test_releasing_twice_undoes_once(records: SandboxRecords, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))

    asyncio.run(records.ledger.release(mount("/a")))
    asyncio.run(records.ledger.release(mount("/a")))

    assert len(undo.undone) == 1


def test_what_could_not_be_undone_stays(records: SandboxRecords, store: StateStore, undo: Undo) -> None:
    records.ledger.acquire(mount("/a"))
    undo.failing = {"/a"}

    with pytest.raises(FailedPrecondition, match="busy"):
        asyncio.run(records.ledger.release(mount("/a")))

    assert on_disk(store) == ["/a"]


def test_what_was_learned_later_replaces_the_intent_in_its_place(
    records: SandboxRecords, store: StateStore, undo: Undo
) -> None:
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

    assert [entry.kind for entry in records.ledger.entries()] == [ResourceKind.DIRECTORY]


def test_a_strike_out_that_cannot_be_written_does_not_fail_the_release(
    records: SandboxRecords, store: StateStore, undo: Undo
) -> None:
    records.ledger.acquire(mount("/a"))
    os.mkdir(f"{store.root}/sb1/.persist.json~")

    asyncio.run(records.ledger.release(mount("/a")))

    assert records.ledger.entries() == ()
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
    assert records.ledger.entries() == ()


def test_a_state_directory_that_cannot_be_removed_does_not_fail_the_end_of_its_sandbox(
    records: SandboxRecords, store: StateStore, tmp_path: Path
) -> None:
    records.save(snapshot())
    Path(f"{store.root}/sb1/link-to-a-directory").symlink_to(tmp_path)

    records.remove()

    assert tmp_path.is_dir()
    assert not Path(f"{store.root}/sb1/persist.json").exists()


def test_the_state_outlives_remove_while_something_is_held(records: SandboxRecords, store: StateStore) -> None:
    records.ledger.acquire(mount("/a"))

    records.remove()

    assert on_disk(store) == ["/a"]
