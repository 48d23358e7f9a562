"""Entries that are released together: at the same time, all tried, failures kept for the next run."""

import asyncio

from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind

MOUNTS = tuple(LedgerEntry(kind=ResourceKind.MOUNT, key=f"/m/{number}") for number in range(21))
KEYS = {mount.key for mount in MOUNTS}
DIRECTORY = LedgerEntry(kind=ResourceKind.DIRECTORY, key="/m")


class SlowLedger:
    """Releases a mount only once the releases of all have begun; `broken` ones fail the first time."""

    def __init__(self, *broken: LedgerEntry) -> None:
        self.acquired: list[tuple[LedgerEntry, ...]] = []
        self.released: list[str] = []
        self.broken = list(broken)
        self._all = asyncio.Barrier(len(MOUNTS))

    def acquire(self, *entries: LedgerEntry) -> None:
        self.acquired.append(entries)

    async def release(self, entry: LedgerEntry) -> None:
        if entry.kind is ResourceKind.MOUNT:
            await self._all.wait()
        if entry in self.broken:
            self.broken.remove(entry)
            raise FailedPrecondition(f"release {entry.key}: EBUSY")
        self.released.append(entry.key)


async def test_slow_unmounts_happen_at_the_same_time_and_before_the_directory_goes() -> None:
    ledger, undo = SlowLedger(), Undo("the test")
    undo.acquire(ledger, DIRECTORY, together=MOUNTS)

    async with asyncio.timeout(30):
        assert await undo.run() is None

    assert ledger.acquired == [(DIRECTORY, *MOUNTS)], "one write of the state"
    assert set(ledger.released[:-1]) == KEYS
    assert ledger.released[-1] == DIRECTORY.key


async def test_one_that_fails_holds_up_no_other_and_is_tried_again() -> None:
    ledger, undo = SlowLedger(MOUNTS[3], MOUNTS[5]), Undo("the test")
    undo.acquire(ledger, together=MOUNTS)

    async with asyncio.timeout(30):
        assert str(await undo.run()) == "release /m/3: EBUSY"
        assert set(ledger.released) == KEYS - {"/m/3", "/m/5"}
        assert await undo.run() is None

    assert set(ledger.released) == KEYS
