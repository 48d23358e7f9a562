"""`delete` for a container of a pod whose shim lives: there is nothing to undo, and the state has the answer.

containerd runs `delete` at the end of every container of a pod, from release 2.4 on, and waits for it. So this case is
answered with what `start` imports. Every other is that of `pyshim/cleanup/delete.py`.
"""

import os
import time

from pyshim.start import address, wire
from pyshim.start.invocation import CommandError, Invocation, checked_id, group_id, os_failure
from pyshim.start.stdlib import parse_json, sha256_digits

TYPE_CHECKING = False  # `typing` itself would cost more than this module
if TYPE_CHECKING:
    from typing import Any

EXIT_KILLED = 137
STATE_ROOT = "/run/vc/sbs"
"""`STATE_ROOT` of `pyshim/model/places.py`."""
STATE_VERSION, OLDEST_STATE_VERSION = 4, 3
"""Of the state's format (`pyshim/state/schema.py`); between them, what is read here has had the same keys."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a state raises that is not there, or damaged."""
_MAX_STATE_BYTES = 64 << 20
_SEAL, _SEALED_END = b',"Checksum":"', b'"}}'
"""What is around the checksum of all before it, at the state's end (`pyshim/state/store.py`)."""


def print_served_answer(call: Invocation, *, state_root: str = STATE_ROOT) -> bool:
    """The answer of `served_answer` is on stdout; False without one. Raises CommandError."""
    answer = served_answer(call, state_root=state_root)
    if answer is None:
        return False
    try:
        while answer:
            answer = answer[os.write(1, answer) :]
    except OSError as error:
        raise os_failure("write answer", "stdout", error) from error
    return True


def served_answer(call: Invocation, *, state_root: str) -> bytes | None:
    """The DeleteResponse for a container of a pod that a shim serves.

    None where that cannot be said for sure: without a readable state, for a sandbox's own container, for another
    containerd's sandbox, and where the bundle's root file system is still mounted. Raises CommandError for a call
    that does not say what to delete.
    """
    container_id = checked_id(call.id, "flag -id")
    bundle = os.path.abspath(call.bundle or ".")
    try:
        sandbox_id = group_id(bundle, container_id)
    except CommandError:
        return None
    if sandbox_id == container_id or _is_mounted(f"{bundle}/rootfs"):
        return None
    try:
        own = _state_of_caller(call, sandbox_id, state_root)
        return delete_response(*_exit_of(own["Snapshot"], container_id)) if _runs(own["Shim"]) else None
    except UNREADABLE:
        return None


def recorded_exit(call: Invocation, sandbox_id: str, *, state_root: str) -> tuple[int, int, int]:
    """As `_exit_of` for the container of `call`; with pid 0 without a readable state of this caller's sandbox."""
    try:
        return _exit_of(_state_of_caller(call, sandbox_id, state_root)["Snapshot"], call.id)
    except UNREADABLE:
        return 0, EXIT_KILLED, time.time_ns()


def _state_of_caller(call: Invocation, sandbox_id: str, state_root: str) -> "dict[str, Any]":
    """Our part of the sandbox's state. Raises one of UNREADABLE, also for a sandbox that another containerd made."""
    state: Any = _whole_state(f"{state_root}/{sandbox_id}/persist.json")
    own: dict[str, Any] = state["Pyshim"]
    if not OLDEST_STATE_VERSION <= own["Version"] <= STATE_VERSION:
        raise ValueError("another release wrote it")
    if not _is_callers(own["Shim"], sandbox_id, call):
        raise LookupError("it is of another sandbox of that name")
    return own


def _whole_state(path: str) -> object:
    """The state in the file. Raises OSError, and ValueError unless it is whole. A FIFO, of size 0, is not read."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size  # Python allocates what it is told to read
        body = file.read(min(size_bytes, _MAX_STATE_BYTES))
    content, _, seal = body.rpartition(_SEAL)
    if seal != sha256_digits(content).encode() + _SEALED_END:
        raise ValueError("its checksum is wrong")
    return parse_json(body)


def _is_callers(shim: "dict[str, Any]", sandbox_id: str, call: Invocation) -> bool:
    """The shim's socket is the one that `start` claimed for `call`."""
    claimed = os.path.basename(shim["Socket"])
    wanted = address.socket_name(call.address, call.namespace, sandbox_id)
    if call.address and len(claimed) == len(wanted) and claimed != wanted:
        return False
    return bool(shim["Namespace"] == call.namespace)


def _runs(shim: "dict[str, Any]") -> bool:
    if shim["PidNamespace"] not in (0, os.stat("/proc/self/ns/pid").st_ino):
        return False
    with open(f"/proc/{shim['Pid']}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == shim["StartTicks"]


def _is_mounted(rootfs: str) -> bool:
    try:
        return os.lstat(rootfs).st_dev != os.lstat(os.path.dirname(rootfs)).st_dev
    except OSError:
        return False


def _exit_of(snapshot: "dict[str, Any]", container_id: str) -> tuple[int, int, int]:
    """(pid, status, time in nanoseconds) of the container's exit; without one in the state, a kill at this moment.

    Raises ValueError for what no shim has written.
    """
    exits = (each["Exit"] for each in snapshot["Containers"] if each["ID"] == container_id)
    known = next((found for found in exits if found is not None), None)
    status, at_ns = (known["Status"], known["ExitedAtNs"]) if known else (EXIT_KILLED, time.time_ns())
    if any(type(value) is not int or value < 0 for value in (snapshot["VmmPid"], status, at_ns)):
        raise ValueError("its numbers are wrong")
    return snapshot["VmmPid"], status, at_ns


def delete_response(pid: int, status: int, exited_at_ns: int) -> bytes:
    """containerd.task.v2.DeleteResponse."""
    timestamp = wire.encode((1, exited_at_ns // 10**9), (2, exited_at_ns % 10**9))
    return wire.encode((1, pid), (2, status), (3, timestamp))
