"""A ledger in memory: remembers the order of everything, undoes through a function, fails on request."""

from collections.abc import Callable

from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind


class FakeLedger:
    """`history` has every successful call in order; `held` what is acquired and not yet released.

    `undo` is called with the entry as last written; the `full_after`th acquire and all after it fail.
    """

    def __init__(
        self, undo: Callable[[LedgerEntry], None] = lambda _entry: None, *, full_after: int | None = None
    ) -> None:
        self.held: dict[tuple[ResourceKind, str], LedgerEntry] = {}
        self.history: list[tuple[str, LedgerEntry]] = []
        self.undo = undo
        self._full_after = full_after

    def acquire(self, *entries: LedgerEntry) -> None:
        acquired = sum(verb == "acquire" for verb, _ in self.history)
        if self._full_after is not None and acquired >= self._full_after:
            raise FailedPrecondition(f"write intent for {entries[0].key!r}: ENOSPC (no space left on device)")
        for entry in entries:
            self.held[entry.kind, entry.key] = entry
            self.history.append(("acquire", entry))

    async def release(self, entry: LedgerEntry) -> None:
        held = self.held.get((entry.kind, entry.key))
        if held is None:
            return
        self.undo(held)
        del self.held[entry.kind, entry.key]
        self.history.append(("release", held))
