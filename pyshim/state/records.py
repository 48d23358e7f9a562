"""The state of a live sandbox on disk: an intent is written before its effect, a strike-out soon after."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import EXCLUSIVE, Ledger, LedgerEntry, ResourceKind
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.state.claims import claimed_cgroups, exclusive_claim, pinned_cpus
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore

log = logging.getLogger(__name__)

STRIKE_OUT_WITHIN_S = 0.05
"""Seconds within which a strike-out is on disk, with another write if one comes sooner. A Delete ends with a write, so
its strike-outs need none of their own. After a crash before the write, the resource is undone once more, which is
harmless."""


class SandboxRecords:
    """One sandbox's persist.json, current until `remove`; it is the sandbox's ledger as well."""

    def __init__(
        self,
        *,
        store: StateStore,
        sandbox_id: SandboxId,
        shim: ShimRecord,
        release: Callable[[LedgerEntry], Awaitable[None]],
    ) -> None:
        """`release` undoes one entry."""
        self._store = store
        self._sandbox_id = sandbox_id
        self._shim = shim
        self._undo = release
        self._entries: dict[tuple[ResourceKind, str], LedgerEntry] = {}
        self._snapshot: SandboxSnapshot | None = None
        self._removed = False
        self._entered = False
        self._timer: asyncio.TimerHandle | None = None
        """Set while strike-outs wait for a write."""

    # ---- the ledger

    @property
    def ledger(self) -> Ledger:
        return self

    @property
    def entry_counts(self) -> Mapping[str, int]:
        return Counter(entry.kind.value for entry in self._entries.values())

    def entries(self) -> tuple[LedgerEntry, ...]:
        """The ledger's entries, in order of acquisition."""
        return tuple(self._entries.values())

    def acquire(self, *entries: LedgerEntry) -> None:
        """The intents are on disk; the same kind and key replaces its entry in place. Raises ShimError: do not act."""
        if self._removed:
            raise FailedPrecondition(f"write ledger of sandbox {self._sandbox_id!r}: its state was removed")
        exclusive = [each for each in entries if each.kind in EXCLUSIVE and (each.kind, each.key) not in self._entries]
        assert not exclusive or len(entries) == 1, "an exclusive entry is acquired alone"
        with exclusive_claim(self._sandbox_id, exclusive[0], self._store.root) if exclusive else nullcontext():
            former = self._entries
            self._entries = {**former, **{(entry.kind, entry.key): entry for entry in entries}}
            try:
                self._write()
            except ShimError:
                self._entries = former
                raise

    async def release(self, entry: LedgerEntry) -> None:
        """The resource is gone and struck out, on disk soon after. An entry that is not in the ledger is success.

        The entry may be the first intent: later details (a pid) are taken from the ledger. Raises ShimError when the
        undo fails; the entry stays then.
        """
        slot = (entry.kind, entry.key)
        current = self._entries.get(slot)
        if current is None:
            return
        await self._undo(current)
        if self._entries.get(slot) is not current:
            return
        del self._entries[slot]
        if entry.kind in EXCLUSIVE:
            self._strike_out(entry)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STRIKE_OUT_WITHIN_S, self._strike_out)

    def _strike_out(self, released: LedgerEntry | None = None) -> None:
        """The ledger is on disk, without the entries that were released. A failure is only logged.

        `released` is named in the log: an exclusive entry, which no other sandbox gets while it stays on disk.

        Their resources are gone; after a crash each entry that stays on disk costs one idempotent undo.
        """
        try:
            self._write()
        except ShimError as error:
            named = {} if released is None else {"kind": released.kind.value, "key": released.key}
            log.warning("strike out of ledger", extra={"sandbox": self._sandbox_id, **named, "error": str(error)})

    # ---- what other sandboxes have

    def pins(self) -> AbstractContextManager[Mapping[int, str]]:
        """For each CPU that another sandbox has pinned, that sandbox. No other shim pins CPUs within the block.

        Entering it blocks; raises ShimError.
        """
        return pinned_cpus(self._sandbox_id, self._store.root)

    def claims(self, cgroups: Iterable[str]) -> AbstractContextManager[Mapping[str, str] | None]:
        """The sandbox of each of the cgroups that another one has; no other shim decides within the block.

        None while another shim decides. Entering it raises ShimError.
        """
        return claimed_cgroups(self._sandbox_id, cgroups, self._store.root)

    # ---- the file

    def save(self, snapshot: SandboxSnapshot) -> None:
        """The snapshot is on disk, whole, with the ledger; ignored after `remove`. Raises ShimError naming the file."""
        self._snapshot = snapshot
        if not self._removed:
            self._write()

    def remove(self) -> None:
        """The sandbox's files are removed, and none is written again. Idempotent, never raises.

        While the ledger has entries the files stay, since nothing else names these. Another failure is only logged: it
        must not fail the Delete or Shutdown whose resources are all gone.
        """
        if self._entries:
            if self._timer is not None:
                self._strike_out()
            log.warning(
                "state not removed: the ledger has entries",
                extra={"sandbox": self._sandbox_id, "entries": len(self._entries)},
            )
            return
        self._removed = True
        self._stop_timer()
        try:
            self._store.remove(self._sandbox_id)
        except ShimError as error:
            log.warning("remove state", extra={"sandbox": self._sandbox_id, "error": str(error)})

    def _write(self) -> None:
        self._stop_timer()
        if not self._entered:
            self._store.enter(self._sandbox_id, self._shim)
            self._entered = True
        self._store.save(
            SandboxState(
                sandbox_id=self._sandbox_id,
                shim=self._shim,
                snapshot=self._snapshot,
                ledger=self.entries(),
            )
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
