"""Checks before a new sandbox: no other running shim has its id, and what a dead one left under that id is undone."""

import time

from pyshim.cleanup.leftovers import undo_remains
from pyshim.host.processes.identity import ProcessRef, is_alive
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.ids import SandboxId
from pyshim.state.schema import ShimRecord, StateDamaged
from pyshim.state.store import StateStore

REMAINS_TIMEOUT_S = 10.0
"""Seconds for the undo of what an earlier shim left."""


def refuse_running_namesake(store: StateStore, sandbox_id: SandboxId, ours: ShimRecord) -> None:
    """No other running shim has a sandbox of this id. Raises FailedPrecondition naming it; NotOurState, StateTooNew.

    Ids are unique in a namespace of containerd only, and Kata's directories are named by the id alone: a second sandbox
    would mount over the first one's share, and its end would remove the first one's directories.
    """
    try:
        theirs = store.load(sandbox_id).shim
    except (NotFound, StateDamaged):
        entered = store.entered(sandbox_id)
        if entered is None:
            return
        theirs = entered
    owner = ProcessRef(theirs.pid, theirs.start_ticks)
    if owner != ProcessRef(ours.pid, ours.start_ticks) and is_alive(owner):
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: the shim of pid {theirs.pid} in namespace {theirs.namespace!r} has one"
        )


def clear_remains(store: StateStore, sandbox_id: SandboxId) -> None:
    """What a dead shim left of a sandbox of this id is undone, before its only record is overwritten.

    Blocks. Raises FailedPrecondition naming what cannot be undone: the new sandbox's record would not list it.
    """
    errors = undo_remains(store, sandbox_id, deadline=time.monotonic() + REMAINS_TIMEOUT_S)
    if errors:
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: an earlier shim left what cannot be undone: {'; '.join(errors)} "
            f"(hint: 'pyshim cleanup {sandbox_id}' tries again)"
        )
