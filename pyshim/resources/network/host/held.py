"""What a network holds on the host, as the ledger has it."""

from collections.abc import Iterable

from pyshim.model.errors import ShimError
from pyshim.model.ledger import Ledger, LedgerEntry


class Held:
    """Entries in the order they were made."""

    def __init__(self, ledger: Ledger) -> None:
        self.entries: list[LedgerEntry] = []
        self._ledger = ledger

    def acquire(self, entry: LedgerEntry) -> None:
        """The intent is on disk; call before the resource is made."""
        self._ledger.acquire(entry)
        self.entries.append(entry)

    def replace(self, entry: LedgerEntry) -> None:
        """The entry that is held says now what `entry` says, on disk as well."""
        self._ledger.acquire(entry)
        self.entries = [entry if (each.kind, each.key) == (entry.kind, entry.key) else each for each in self.entries]

    async def release(self, entries: Iterable[LedgerEntry]) -> None:
        """Each of these, which are held, is undone, the last first, and held no more.

        Raises the first ShimError after having tried everything; what could not be undone is still held.
        """
        failure: ShimError | None = None
        for entry in reversed(tuple(entries)):
            try:
                await self._ledger.release(entry)
            except ShimError as error:
                failure = failure or error
            else:
                self.entries.remove(entry)
        if failure is not None:
            raise failure
