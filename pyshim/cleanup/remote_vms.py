"""The end of a remote VM whose shim is gone: StopVM, called by `delete` or `pyshim cleanup`.

A service deletes the VM within the call, and may give up when the connection closes. Then no process has a record of
the VM. So only a caller that can wait for the answer makes the call (`stop_remote_vm`, synchronous like every undo).

That may take minutes, and `delete` has seconds. Its work is done by another process (`background.py`), which keeps the
connection to the service and the lock on the sandbox's state, and strikes the VM out when the service has answered.
While the shim lives, that process waits for the shim first: a shim that is killed in the middle of StopVM hangs up on a
service that is deleting the VM.
"""

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pyshim.cleanup.lost_vms import write_tombstone
from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.remote_vms import MAX_REPLY_BYTES, SERVICE, RemoteVmState, is_unknown_vm, shown
from pyshim.start.wire import encode

if TYPE_CHECKING:
    from pyshim.ttrpc.connection import ResponseReceived

USUAL_PATIENCE_S = 600
"""Seconds for StopVM where the ledger does not say: some clouds take minutes to delete a VM."""
CONNECT_TIMEOUT_S = 10.0
MARGIN_S = 60.0
"""Seconds for what a shim undoes besides its VM."""
PAUSE_S = 1.0
CROWDED_PAUSE_S = 0.05


def remote_vms(ledger: tuple[LedgerEntry, ...]) -> tuple[LedgerEntry, ...]:
    return tuple(entry for entry in ledger if entry.kind is ResourceKind.REMOTE_VM)


def are_stopped(entries: tuple[LedgerEntry, ...]) -> bool:
    """StopVM has been answered for each of them, also by a service that has forgotten the VM."""
    return all(entry.detail.get("state") in (RemoteVmState.STOPPED, RemoteVmState.LOST) for entry in entries)


def patience_s(entry: LedgerEntry) -> float:
    """Seconds that the end of this VM may take."""
    stop_s = entry.detail.get("stop_timeout_s")
    return float(stop_s) if isinstance(stop_s, int) and stop_s > 0 else USUAL_PATIENCE_S


def hold_s(entry: LedgerEntry) -> float:
    """Seconds for which a shim that was asked to end may still be busy with this VM.

    With the CreateVM or StartVM under way, then with StopVM, each up to its deadline.
    """
    until = entry.detail.get("asked_until_s")
    left_s = until - time.time() if isinstance(until, int) else 0.0
    # The clock of the day may have been set back; no call's deadline is longer than that of StopVM.
    return min(max(0.0, left_s), patience_s(entry)) + patience_s(entry) + MARGIN_S


def stop_remote_vm(entry: LedgerEntry, deadline: float) -> None:
    """The service has answered StopVM, or has no such VM and never will.

    If the service has forgotten a VM that was started, the VM then has a tombstone.

    Raises FailedPrecondition without a call when `deadline` leaves too little time; Unavailable when the service cannot
    be reached or drops the call; FailedPrecondition with the service's text, or while a CreateVM whose caller is gone
    may still be carried out.
    """
    state = entry.detail.get("state")
    if state == RemoteVmState.STOPPED:
        return
    if state == RemoteVmState.LOST:
        write_tombstone(entry)
        return
    left_s = deadline - time.monotonic()
    if left_s + 1 < patience_s(entry):
        raise FailedPrecondition(
            f"release remote-vm {entry.key!r}: its end may take {patience_s(entry):g} s, and its caller must be able "
            f"to wait (hint: 'pyshim cleanup' can)"
        )
    while _is_unknown(entry, deadline):
        if state == RemoteVmState.STARTED:
            write_tombstone(entry)
            return
        if not _may_come_yet(entry):
            return
        if time.monotonic() + PAUSE_S > deadline:
            raise FailedPrecondition(
                f"release remote-vm {entry.key!r}: the service does not know it, but may still be making it"
            )
        time.sleep(PAUSE_S)


def _may_come_yet(entry: LedgerEntry) -> bool:
    """CreateVM was perhaps sent, and its deadline has not passed. By the clock of the day: the asker is gone."""
    until = entry.detail.get("asked_until_s")
    return entry.detail.get("state") == RemoteVmState.ASKED and isinstance(until, int) and time.time() < until


def _is_unknown(entry: LedgerEntry, deadline: float) -> bool:
    """StopVM was answered: False when it was carried out, True when the service has no such VM."""
    action = f"release remote-vm {entry.key!r}"
    path = str(entry.detail.get("socket", ""))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            _connect(sock, path, min(deadline, time.monotonic() + CONNECT_TIMEOUT_S))
            reply = _exchange(sock, entry.key, deadline)
    except TimeoutError:
        raise Unavailable(f"{action}: remote hypervisor '{path}' has not answered in time") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise Unavailable(f"{action}: remote hypervisor '{path}': {cause}") from error
    if reply is None:
        raise Unavailable(f"{action}: remote hypervisor '{path}' closed the connection before it answered")
    if reply.code == 0:
        return False
    if is_unknown_vm(entry.key, reply.code, reply.message):
        return True
    raise FailedPrecondition(f"{action}: remote hypervisor '{path}' says: {shown(reply.message)}")


def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    """`sock` is connected, once the listener has room for one more. Raises TimeoutError at `deadline`."""
    sock.settimeout(CONNECT_TIMEOUT_S)
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(CROWDED_PAUSE_S)


def _exchange(sock: socket.socket, vm_id: str, deadline: float) -> "ResponseReceived | None":
    """The answer; None when the peer closed first. Raises ValueError for an answer that cannot be used.

    No deadline is on the wire: the service must not give up.
    """
    # Loads asyncio, which the clean-up of a local VM does without.
    from pyshim.ttrpc.connection import ClientConnection, ResponseReceived, StreamFailed

    core = ClientConnection()  # of hypervisor.StopVMRequest, `id` is field 1
    stream_id, frame = core.request(SERVICE, "StopVM", encode((1, vm_id)), max_reply_bytes=MAX_REPLY_BYTES)
    sock.sendall(frame)
    # Other frames may come without end, and then no single wait is long.
    while (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        with suppress(InterruptedError):
            data = sock.recv(1 << 16)
            if not data:
                return None
            for event in core.receive_data(data):
                if event.stream_id != stream_id:
                    continue
                if isinstance(event, StreamFailed):
                    raise ValueError(str(event.error))
                if isinstance(event, ResponseReceived):
                    return event
    raise TimeoutError
