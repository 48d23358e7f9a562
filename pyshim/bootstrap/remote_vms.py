"""`delete` and remote VMs: the end of one may take minutes, and `delete` has seconds.

So another process ends it: it keeps the connection to the service, the lock on the sandbox's state, and nothing else of
its parent, and strikes the VM out when the service has answered. While the shim lives, that process waits for the shim
first: killed in the middle of StopVM, it would hang up on a service that is deleting the VM.
"""

import os
import select
import time
from contextlib import suppress

from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.remote_vms import RemoteVmState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

HEARD_S = 1.0
"""What fails at once (no service) is told; what takes longer may take minutes, and nobody gains by waiting for it."""
_MAX_TEXT_BYTES = 1 << 16


def remote_vms(ledger: "tuple[LedgerEntry, ...]") -> "tuple[LedgerEntry, ...]":
    return tuple(entry for entry in ledger if entry.kind is ResourceKind.REMOTE_VM)


def are_stopped(entries: "tuple[LedgerEntry, ...]") -> bool:
    """StopVM has been answered for each of them: nobody waits for a service any more."""
    return all(entry.detail.get("state") == RemoteVmState.STOPPED for entry in entries)


def in_background(work: "Callable[[list[str]], None]", action: str, deadline: float, errors: "list[str]") -> int:
    """The pid of a process that is still at `work`, or 0 when it has ended; it is waited for until `deadline`.

    `work` appends what it could not do to its argument. `errors` gets that if it ended in time: what it meets later is
    in nobody's ears, and has to be on record. The caller must be a process of one thread.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            code = _work_here(work, action, theirs)
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        told, is_over = _told_until(ours, min(deadline, time.monotonic() + HEARD_S))
    finally:
        os.close(ours)
    if not is_over:
        return pid
    _, status = os.waitpid(pid, 0)
    errors += [line for line in told.decode(errors="replace").splitlines() if line]
    if status and not told:
        errors.append(f"{action}: the process that was to do it ended with status {status}")
    return 0


def _work_here(work: "Callable[[list[str]], None]", action: str, parent: int) -> int:
    os.setsid()
    os.chdir("/")
    # containerd reads our parent's output until everybody has closed it.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    errors: list[str] = []
    try:
        work(errors)
    except Exception as error:  # the parent, if it still listens, is to hear of it
        errors.append(f"{action}: {error}")
    with suppress(OSError):
        os.write(parent, "\n".join(errors).encode()[:_MAX_TEXT_BYTES])
    return 1 if errors else 0


def _told_until(fd: int, deadline: float) -> "tuple[bytes, bool]":
    """What was written into the pipe, and whether all its writers have gone."""
    told = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(fd, _MAX_TEXT_BYTES)
        if not piece:
            return told, True
        told += piece
    return told, False
