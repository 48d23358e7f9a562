"""The ledger entries of one network's resources on the host."""

from collections.abc import Iterable

from pyshim.model.errors import ShimError
from pyshim.model.ledger import Ledger, LedgerEntry


class AcquiredEntries:
    """Entries in the order they were made."""

    def __init__(self, ledger: Ledger) -> None:
        self.entries: list[LedgerEntry] = []
        self._ledger = ledger

    def acquire(self, entry: LedgerEntry) -> None:
        """The intent is on disk; call before the resource is made."""
        self._ledger.acquire(entry)
        self.entries.append(entry)

    def replace(self, entry: LedgerEntry) -> None:
        """`entry` stands in place of the acquired one of its kind and key, on disk as well."""
        self._ledger.acquire(entry)
        self.entries = [entry if (each.kind, each.key) == (entry.kind, entry.key) else each for each in self.entries]

    async def release(self, entries: Iterable[LedgerEntry]) -> None:
        """The resources are released, the last first, and their entries removed.

        Raises the first ShimError after all were tried; entries of resources that could not be released stay.
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
