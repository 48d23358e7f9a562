"""Sandboxes whose shim is gone: found by their states, by the register, and by what runs under their name.

A sandbox that may be another runtime's, or a living shim's, is spared, with a reason.
"""

import time
from typing import NamedTuple

from msgspec.structs import replace

from pyshim.cleanup.leftovers import locked
from pyshim.cleanup.names import Places, belongs_to, containers_of, conventional_ledger, is_foreign, named_vmms
from pyshim.cleanup.remote_vms import remote_vms
from pyshim.cleanup.sockets import remove_dead_socket
from pyshim.cleanup.undo import undo_entries
from pyshim.host.processes import identity as processes
from pyshim.model.errors import NotFound, ShimError
from pyshim.model.ledger import LedgerEntry
from pyshim.state.schema import NotOurState, SandboxState, ShimRecord, StateDamaged
from pyshim.state.store import StateStore

ONE_SANDBOX_S = 60.0
"""Seconds for all entries of one sandbox but its remote VMs."""


class Orphan(NamedTuple):
    """A sandbox of ours without a living shim."""

    sandbox_id: str
    known_by: str
    shim: ShimRecord | None
    state: SandboxState | None
    ledger: tuple[LedgerEntry, ...]
    """The entries to undo, from the end."""


class Spared(NamedTuple):
    """The reason why a sandbox must not be cleaned."""

    reason: str
    is_served: bool
    is_readable: bool = True
    """False: this release cannot read its state, so it stays even if its shim is dead."""


def candidates(store: StateStore, places: Places) -> tuple[str, ...]:
    """Every id that has a state here, an entry in the register, or a VMM that is named for it; sorted."""
    vmms = (sandbox_id for sandbox_id, _ in named_vmms(places))
    return tuple(sorted({*store.sandbox_ids(), *store.entered_ids(), *vmms}))


def judged(store: StateStore, sandbox_id: str, places: Places) -> Orphan | Spared | None:
    """The sandbox as an orphan or spared; None if nothing on the host belongs to it."""
    known_by, state, shim = "its state", None, None
    try:
        state = store.load(sandbox_id)
        shim = state.shim
    except NotOurState:
        return Spared("its state is another runtime's", is_served=False)
    except (NotFound, StateDamaged) as error:
        is_there = isinstance(error, StateDamaged)
        shim = store.entered(sandbox_id)
        if shim is not None:
            known_by = f"the register ({error})"
        elif is_there and store.names_us(sandbox_id):
            known_by = f"the remains of its state ({error})"
        elif any(name == sandbox_id for name, _ in named_vmms(places)):
            known_by = f"its VMM ({error})"
        else:
            return Spared(f"nothing shows whose it is: {error}", is_served=False) if is_there else None
    except ShimError as error:
        return Spared(str(error), is_served=False, is_readable=False)
    if shim is not None and shim.pid_namespace not in (0, processes.our_pid_namespace()):
        return Spared(f"shim {shim.pid} is of another pid namespace and cannot be seen here", is_served=False)
    if shim is not None and processes.is_alive(processes.ProcessRef(shim.pid, shim.start_ticks)):
        return Spared(f"shim {shim.pid} of namespace {shim.namespace!r} serves it", is_served=True)
    if shim is None and (guardian := _guardian(sandbox_id, places)):
        return Spared(f"process {guardian} looks like its shim", is_served=True)
    ledger = state.ledger if state is not None else conventional_ledger(sandbox_id, places)
    return Orphan(sandbox_id, known_by, shim, state, ledger)


def _guardian(sandbox_id: str, places: Places) -> int:
    """The parent of the sandbox's VMM while that may be its shim, which nothing names: a Python program; else 0."""
    for name, vmm in named_vmms(places):
        parent = processes.parent(vmm.pid)
        ticks = processes.start_ticks(parent) if name == sandbox_id and parent > 1 else None
        if ticks is not None and processes.program_name(processes.ProcessRef(parent, ticks)).startswith("python"):
            return parent
    return 0


def clean_orphan(
    store: StateStore, sandbox_id: str, places: Places
) -> tuple[Orphan | Spared | None, tuple[LedgerEntry, ...], list[str]]:
    """The judgement, made again under the state's lock; of an orphan, what could not be undone, and why."""
    errors: list[str] = []
    deadline = time.monotonic() + ONE_SANDBOX_S
    with locked(store.directory(sandbox_id), deadline) as is_alone:
        found = judged(store, sandbox_id, places)
        if not isinstance(found, Orphan):
            return found, (), errors
        if found.state is not None and not is_alone and (remote := remote_vms(found.ledger)):
            # StopVM is under way for minutes; a second one meets a service in the middle of the first.
            reason = f"another process cleans it, and ends remote vm '{remote[0].key}'"
            return Spared(reason, is_served=False), (), errors
        containers = containers_of(sandbox_id, places, found.state)
        check = belongs_to(sandbox_id, places, store.root, container_ids=containers)
        left = undo_entries(found.ledger, deadline=deadline, errors=errors, check=check)
        # Foreign entries are in `errors` and are dropped: every later run would fail on them.
        own = tuple(entry for entry in left if not is_foreign(entry, check))
        if not own:
            _forget(store, found, errors)
        elif found.state is not None:
            store.save(replace(found.state, ledger=own))
    return found, left, errors


def _forget(store: StateStore, found: Orphan, errors: list[str]) -> None:
    """The sandbox's records are removed; its state last."""
    if found.shim is not None:
        remove_dead_socket(found.shim.socket)
    try:
        store.remove(found.sandbox_id)
    except ShimError as error:
        errors.append(str(error))
