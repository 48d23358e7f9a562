"""The state of a live sandbox on disk: an intent is written before its effect, a strike-out soon after.

Beside it, the CPUs, cgroups and devices of the node's other sandboxes, from their states, under a lock of all shims.
"""

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TypeVar

from pyshim import __version__
from pyshim.host.files import lock_within, open_directory
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.identity import our_pid_namespace
from pyshim.host.processes.stat import start_ticks_of
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import EXCLUSIVE, Ledger, LedgerEntry, ResourceKind
from pyshim.model.places import STATE_ROOT
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore

log = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Seconds to wait for the lock in a thread. Other shims have it while they read the states of the node."""
_SHORT_WAIT_S = 1.0
"""Seconds to wait for the lock in the event loop, which answers no call meanwhile."""
_PLAIN = re.compile("[A-Za-z0-9_.-]+")
"""A part of a key that is the same in every JSON text."""
K = TypeVar("K")


@contextmanager
def pinned_cpus(sandbox_id: str, root: str = STATE_ROOT) -> Iterator[Mapping[int, str]]:
    """For each CPU that another sandbox has pinned, that sandbox.

    Within the block no other shim can pin CPUs; our pins must be on disk before it ends. Entering it blocks.
    Raises DeadlineExceeded, FailedPrecondition.
    """
    with _locked(root, _WAIT_S, "pin cpus"):
        yield _taken(StateStore(root=root), sandbox_id, _pins_of)


@contextmanager
def claimed_cgroups(
    sandbox_id: str, cgroups: Iterable[str], root: str = STATE_ROOT
) -> Iterator[Mapping[str, str] | None]:
    """The sandbox of each of the cgroups that another one's ledger has, whether or not its shim runs.

    No other shim decides within the block. None if another one decides now. Raises FailedPrecondition.
    """
    claims_of = _claims_of(ResourceKind.CGROUP, cgroups)
    with ExitStack() as lock:
        try:
            lock.enter_context(_locked(root, 0.0, "claim cgroups"))
        except DeadlineExceeded:
            yield None
            return
        yield _taken(StateStore(root=root), sandbox_id, claims_of)


@contextmanager
def exclusive_claim(sandbox_id: str, entry: LedgerEntry, root: str = STATE_ROOT) -> Iterator[None]:
    """Within the block no other sandbox's ledger has such an entry or gets one.

    Entering it blocks. Raises FailedPrecondition naming the sandbox that has it, whether or not its shim runs;
    DeadlineExceeded when others decide for too long.
    """
    action = f"take {entry.kind.value} {entry.key!r}"
    with _locked(root, _SHORT_WAIT_S, action):
        taken = _taken(StateStore(root=root), sandbox_id, _claims_of(entry.kind, (entry.key,)))
        if other := taken.get(entry.key):
            raise FailedPrecondition(
                f"{action}: sandbox {other!r} has it (hint: if its shim is gone, 'pyshim cleanup {other}')"
            )
        yield


def _claims_of(kind: ResourceKind, keys: Iterable[str]) -> Callable[[StateStore, str], Iterable[str]]:
    """A function that returns those of the keys that a sandbox's ledger has."""
    wanted = frozenset(keys)
    parts = tuple(max(_PLAIN.findall(key.rpartition("/")[2]), key=len, default="").encode() for key in wanted)

    def claims_of(store: StateStore, other: str) -> Iterable[str]:
        # Most states of a busy node name none of them, and decoding JSON takes most of the time.
        if not store.mentions(other, parts):
            return ()
        ledger = store.load(other).ledger
        return (entry.key for entry in ledger if entry.kind is kind and entry.key in wanted)

    return claims_of


@contextmanager
def _locked(root: str, wait_s: float, action: str) -> Iterator[None]:
    """This shim has the lock within the block. Raises FailedPrecondition, DeadlineExceeded after `wait_s`."""
    with os_errors(f"{action}: lock '{root}'"):
        lock = open_directory(root)
    with lock:
        if not lock_within(lock, wait_s):
            raise DeadlineExceeded(f"{action}: other shims decide for too long")
        yield


def _taken(store: StateStore, sandbox_id: str, keys_of: Callable[[StateStore, str], Iterable[K]]) -> dict[K, str]:
    taken: dict[K, str] = {}
    for other in store.sandbox_ids():
        # Another runtime's state, or one that cannot be read, claims nothing.
        with suppress(ShimError, OSError):
            if other != sandbox_id:
                taken.update(dict.fromkeys(keys_of(store, other), other))
    return taken


def _pins_of(store: StateStore, sandbox_id: str) -> Iterable[int]:
    snapshot = store.load(sandbox_id).snapshot
    pinned = snapshot.cgroups.get("Pinned") if snapshot is not None else None
    return tuple(cpu for cpu in pinned.values() if isinstance(cpu, int)) if isinstance(pinned, Mapping) else ()


STRIKE_OUT_WITHIN_S = 0.05
"""Seconds within which a strike-out is on disk, with another write if one comes sooner. A Delete ends with a write, so
its strike-outs need none of their own. After a crash before the write, the resource is undone once more, which is
harmless."""


def own_record(*, socket: str = "", namespace: str = "") -> ShimRecord:
    """This process, as the one that serves a sandbox at `socket` for containerd's `namespace`."""
    return ShimRecord(
        pid=os.getpid(),
        start_ticks=start_ticks_of(os.getpid()),
        socket=socket,
        namespace=namespace,
        pid_namespace=our_pid_namespace(),
        version=__version__,
    )


class SandboxRecords:
    """One sandbox's persist.json, current until `remove`; it is the sandbox's ledger as well."""

    def __init__(
        self,
        *,
        store: StateStore,
        sandbox_id: SandboxId,
        shim: ShimRecord,
        undo: Callable[[LedgerEntry], Awaitable[None]],
    ) -> None:
        """`undo` undoes one entry."""
        self._store = store
        self._sandbox_id = sandbox_id
        self._shim = shim
        self._undo = undo
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
