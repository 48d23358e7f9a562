"""CPUs, cgroups and devices of the node's other sandboxes, from their states; under a lock of the node's shims."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from pyshim.host.files import lock_within, open_directory
from pyshim.host.os_errors import os_errors
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state.store import ROOT, StateStore

_WAIT_S = 5.0
"""Seconds to wait for the lock in a thread. Other shims have it while they read the states of the node."""
_SHORT_WAIT_S = 1.0
"""Seconds to wait for the lock in the event loop, which answers no call meanwhile."""
_PLAIN = re.compile("[A-Za-z0-9_.-]+")
"""A part of a key that is the same in every JSON text."""
K = TypeVar("K")


@contextmanager
def pinned_cpus(sandbox_id: str, root: str = ROOT) -> Iterator[Mapping[int, str]]:
    """For each CPU that another sandbox has pinned, that sandbox.

    Within the block no other shim can pin CPUs; our pins must be on disk before it ends. Entering it blocks.
    Raises DeadlineExceeded, FailedPrecondition.
    """
    with _locked(root, _WAIT_S, "pin cpus"):
        yield _taken(StateStore(root=root), sandbox_id, _pins_of)


@contextmanager
def claimed_cgroups(sandbox_id: str, cgroups: Iterable[str], root: str = ROOT) -> Iterator[Mapping[str, str] | None]:
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
def exclusive_claim(sandbox_id: str, entry: LedgerEntry, root: str = ROOT) -> Iterator[None]:
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
