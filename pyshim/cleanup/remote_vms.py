"""The end of a remote VM whose shim is gone: StopVM, called by `delete` or `pyshim cleanup`.

A service deletes the VM within the call and may give up when the connection closes, after which no process knows of
the VM. So only a caller that can wait for the answer makes the call (`stop_remote_vm`, synchronous like every undo).

That may take minutes, and `delete` has seconds. So it leaves the call to another process (`in_background`), which keeps
the connection to the service, the lock on the sandbox's state and nothing else of its parent, and strikes the VM out
when the service has answered. While the shim lives, that process waits for the shim first: a shim that is killed in the
middle of StopVM hangs up on a service that is deleting the VM.
"""

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from pyshim.cleanup.lost_vms import bury
from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.remote_vms import SERVICE, RemoteVmState, is_unknown_vm, shown
from pyshim.ttrpc.connection import ClientConnection
from pyshim.ttrpc.events import ResponseReceived, StreamFailed

USUAL_PATIENCE_S = 600
"""Seconds for StopVM where the ledger does not say: some clouds take minutes to delete a VM."""
CONNECT_TIMEOUT_S = 10.0
MARGIN_S = 60.0
"""Seconds for what a shim undoes besides its VM."""
PAUSE_S = 1.0
CROWDED_PAUSE_S = 0.05
HEARD_S = 1.0
"""Seconds that `in_background` waits: an error at once (no service) is reported, a longer call is not waited for."""
_MAX_TEXT_BYTES = 1 << 16


def remote_vms(ledger: tuple[LedgerEntry, ...]) -> tuple[LedgerEntry, ...]:
    return tuple(entry for entry in ledger if entry.kind is ResourceKind.REMOTE_VM)


def are_stopped(entries: tuple[LedgerEntry, ...]) -> bool:
    """StopVM has been answered for each of them, also by a service that has forgotten the VM."""
    return all(entry.detail.get("state") in (RemoteVmState.STOPPED, RemoteVmState.LOST) for entry in entries)


def in_background(work: Callable[[list[str]], None], action: str, deadline: float, errors: list[str]) -> int:
    """The pid of a process that is still at `work`, or 0 when it has ended; it is waited for until `deadline`.

    `work` appends what it could not do to its argument. `errors` gets that if it ended in time; later errors show
    only in the ledger. The caller must be a process of one thread.
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


def _work_here(work: Callable[[list[str]], None], action: str, parent: int) -> int:
    os.setsid()
    os.chdir("/")
    # containerd reads our parent's output until every process has closed it.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    errors: list[str] = []
    try:
        work(errors)
    except Exception as error:  # the parent reports it, if it still reads
        errors.append(f"{action}: {error}")
    with suppress(OSError):
        os.write(parent, "\n".join(errors).encode()[:_MAX_TEXT_BYTES])
    return 1 if errors else 0


def _told_until(fd: int, deadline: float) -> tuple[bytes, bool]:
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

    A VM that was started and that the service does not know any more has a tombstone then.

    Raises FailedPrecondition without a call when `deadline` leaves too little time; Unavailable when the service cannot
    be reached or drops the call; FailedPrecondition with its words, or while a CreateVM whose caller is gone may still
    be carried out.
    """
    state = entry.detail.get("state")
    if state == RemoteVmState.STOPPED:
        return
    if state == RemoteVmState.LOST:
        bury(entry)
        return
    left_s = deadline - time.monotonic()
    if left_s + 1 < patience_s(entry):
        raise FailedPrecondition(
            f"release remote-vm {entry.key!r}: its end may take {patience_s(entry):g} s, and its caller must be able "
            f"to wait (hint: 'pyshim cleanup' can)"
        )
    while _is_unknown(entry, deadline):
        if state == RemoteVmState.STARTED:
            bury(entry)
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
