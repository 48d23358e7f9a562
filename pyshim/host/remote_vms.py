"""The end of a remote VM whose shim is gone: StopVM, by whoever comes after.

Synchronous and import-light like every undo. A service deletes the VM within the call and may give up when the
connection closes, after which nobody knows of the VM: so nobody begins who cannot wait for the answer.
"""

import socket
import time
from contextlib import suppress

from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.ledger import LedgerEntry
from pyshim.model.remote_vms import SERVICE, RemoteVmState, is_unknown_vm, shown
from pyshim.ttrpc.connection import ClientConnection
from pyshim.ttrpc.events import ResponseReceived, StreamFailed

USUAL_PATIENCE_S = 600
CONNECT_TIMEOUT_S = 10.0
MARGIN_S = 60.0
"""For what a shim undoes besides its VM."""
PAUSE_S = 1.0
CROWDED_PAUSE_S = 0.05


def patience_s(entry: LedgerEntry) -> float:
    """How long the end of this VM may take."""
    told = entry.detail.get("stop_timeout_s")
    return float(told) if isinstance(told, int) and told > 0 else USUAL_PATIENCE_S


def hold_s(entry: LedgerEntry) -> float:
    """How long a shim that was asked to end may still rightly be busy with this VM.

    With the CreateVM or StartVM under way, then with StopVM, each up to its deadline.
    """
    until = entry.detail.get("asked_until_s")
    left_s = until - time.time() if isinstance(until, int) else 0.0
    # The clock of the day may have been set back; no call's deadline is longer than that of StopVM.
    return min(max(0.0, left_s), patience_s(entry)) + patience_s(entry) + MARGIN_S


def stop_remote_vm(entry: LedgerEntry, deadline: float) -> None:
    """The service has answered StopVM, or knows no such VM and never will.

    Raises FailedPrecondition without a call when `deadline` leaves too little time; Unavailable when the service cannot
    be reached or drops the call; FailedPrecondition with its words, or while a CreateVM whose caller is gone may still
    be carried out.
    """
    if entry.detail.get("state") == RemoteVmState.STOPPED:
        return
    left_s = deadline - time.monotonic()
    if left_s + 1 < patience_s(entry):
        raise FailedPrecondition(
            f"release remote-vm {entry.key!r}: its end may take {patience_s(entry):g} s, and whoever begins it must be "
            f"able to wait (hint: 'pyshim cleanup' can)"
        )
    while _is_unknown(entry, deadline) and _may_come_yet(entry):
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
    """StopVM was answered: False when it was carried out, True when the service knows no such VM."""
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
    if isinstance(reply, StreamFailed):
        raise Unavailable(f"{action}: remote hypervisor '{path}': {reply.error}")
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


def _exchange(sock: socket.socket, vm_id: str, deadline: float) -> ResponseReceived | StreamFailed | None:
    """The answer; None when the peer closed first. No deadline is on the wire: the service must not give up."""
    core = ClientConnection()
    stream_id, frame = core.send_request(SERVICE, "StopVM", _stop_request(vm_id))
    sock.sendall(frame)
    # What comes instead of the answer may come without end, and then no single wait is long.
    while (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        with suppress(InterruptedError):
            data = sock.recv(1 << 16)
            if not data:
                return None
            for event in core.receive_data(data):
                if event.stream_id == stream_id and isinstance(event, ResponseReceived | StreamFailed):
                    return event
    raise TimeoutError


def _stop_request(vm_id: str) -> bytes:
    """hypervisor.StopVMRequest, `id` being its field 1; protobuf's library costs more than the whole call."""
    text = vm_id.encode()
    length = bytearray()
    rest = len(text)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return b"\x0a" + bytes(length) + text
