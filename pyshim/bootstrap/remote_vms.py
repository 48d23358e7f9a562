"""`delete` and remote VMs: the end of one may take minutes, and `delete` has seconds.

So another process ends it: it keeps the connection to the service, the lock on the sandbox's state, and nothing else of
its parent, and strikes the VM out when the service has answered.
"""

import os
import select
import time
from contextlib import suppress

from pyshim.host.release import release_all
from pyshim.model.ledger import LedgerEntry, ResourceKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_TEXT_BYTES = 1 << 16


def remote_vms(ledger: "tuple[LedgerEntry, ...]") -> "tuple[LedgerEntry, ...]":
    return tuple(entry for entry in ledger if entry.kind is ResourceKind.REMOTE_VM)


def end_in_background(
    entries: "tuple[LedgerEntry, ...]", strike_out: "Callable[[], None]", deadline: float, errors: "list[str]"
) -> int:
    """The pid of a process that is still ending the VMs at `deadline`; 0 when it has ended before.

    `strike_out` is called there, once the VMs are gone. `errors` gets what it met, if it ended in time: what it meets
    later is in nobody's ears, but the VMs stay on record. The caller must be a process of one thread.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            code = _end_here(entries, strike_out, theirs)
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        told, is_over = _told_until(ours, deadline)
    finally:
        os.close(ours)
    if not is_over:
        return pid
    _, status = os.waitpid(pid, 0)
    errors += [line for line in told.decode(errors="replace").splitlines() if line]
    if status and not told:
        errors.append(f"end remote vm {entries[0].key!r}: the process that was to do it ended with status {status}")
    return 0


def _end_here(entries: "tuple[LedgerEntry, ...]", strike_out: "Callable[[], None]", parent: int) -> int:
    os.setsid()
    os.chdir("/")
    # containerd reads our parent's output until everybody has closed it.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    errors: list[str] = []
    try:
        held = release_all(entries, deadline=time.monotonic(), one_timeout_s=0, errors=errors, patient=True)
        if not held:
            strike_out()
    except Exception as error:  # the parent, if it still listens, is to hear of it
        errors.append(f"end remote vm {entries[0].key!r}: {error}")
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
