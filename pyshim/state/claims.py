"""CPUs, cgroups and devices that the node's other sandboxes have, by their states. One shim at a time decides by it."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state.store import ROOT, StateStore

_WAIT_S = 5.0
"""Seconds to wait for the lock in a thread: other shims have it while they read the states of the node."""
_SHORT_WAIT_S = 1.0
"""Seconds to wait for the lock on the event loop, which answers no call meanwhile."""
_PAUSE_S = 0.01
"""Seconds between two attempts to lock."""
_PLAIN = re.compile("[A-Za-z0-9_.-]+")
"""Part of a key that JSON spells in one way only."""
K = TypeVar("K")


class PinnedCpus:
    """The lock, owned until our state is on disk, and `taken`: the other sandbox of each pinned CPU."""

    def __init__(self, lock_fd: int, taken: Mapping[int, str]) -> None:
        self._lock_fd = lock_fd
        self.taken = taken

    def __enter__(self) -> "PinnedCpus":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._lock_fd)


def pinned_cpus(sandbox_id: str, root: str = ROOT) -> PinnedCpus:
    """The CPUs that all other sandboxes pin. Blocks for a moment. Raises DeadlineExceeded, FailedPrecondition."""
    fd = _locked(root, _WAIT_S, "pin cpus")
    try:
        return PinnedCpus(fd, _taken(StateStore(root=root), sandbox_id, _pins_of))
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def claimed_cgroups(sandbox_id: str, cgroups: Iterable[str], root: str = ROOT) -> Iterator[Mapping[str, str] | None]:
    """The sandbox of each of the cgroups that another one's ledger has, its shim alive or not.

    No other shim decides before the block is left; None when one does at this moment. Raises FailedPrecondition.
    """
    claims_of = _claims_of(ResourceKind.CGROUP, cgroups)
    try:
        fd = _locked(root, 0.0, "claim cgroups")
    except DeadlineExceeded:
        yield None
        return
    try:
        yield _taken(StateStore(root=root), sandbox_id, claims_of)
    finally:
        os.close(fd)


@contextmanager
def exclusive_claim(sandbox_id: str, entry: LedgerEntry, root: str = ROOT) -> Iterator[None]:
    """In the block no other sandbox's ledger has such an entry, nor gets one.

    Entering it blocks for a moment. Raises FailedPrecondition naming the sandbox that has it, its shim alive or not;
    DeadlineExceeded when others decide for too long.
    """
    action = f"take {entry.kind.value} {entry.key!r}"
    fd = _locked(root, _SHORT_WAIT_S, action)
    try:
        taken = _taken(StateStore(root=root), sandbox_id, _claims_of(entry.kind, (entry.key,)))
        if other := taken.get(entry.key):
            raise FailedPrecondition(
                f"{action}: sandbox {other!r} has it (hint: if its shim is gone, 'pyshim cleanup {other}')"
            )
        yield
    finally:
        os.close(fd)


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


def _locked(root: str, wait_s: float, action: str) -> int:
    """A descriptor with the lock. Raises FailedPrecondition; DeadlineExceeded when others have it for `wait_s`."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(f"{action}: lock '{root}': {error.strerror}") from error
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"{action}: other shims decide for too long") from None
                time.sleep(_PAUSE_S)
    except BaseException:
        os.close(fd)
        raise


def _taken(store: StateStore, sandbox_id: str, things_of: Callable[[StateStore, str], Iterable[K]]) -> dict[K, str]:
    taken: dict[K, str] = {}
    for other in store.sandbox_ids():
        # Another runtime's state, or one that cannot be read, claims nothing.
        with suppress(ShimError, OSError):
            if other != sandbox_id:
                taken.update(dict.fromkeys(things_of(store, other), other))
    return taken


def _pins_of(store: StateStore, sandbox_id: str) -> Iterable[int]:
    snapshot = store.load(sandbox_id).snapshot
    pinned = snapshot.cgroups.get("Pinned") if snapshot is not None else None
    return tuple(cpu for cpu in pinned.values() if isinstance(cpu, int)) if isinstance(pinned, Mapping) else ()
