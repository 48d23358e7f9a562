"""`delete`: containerd's request to clean up after a container whose shim has gone, or is just going.

containerd runs it after every task, for up to five seconds, mostly with nothing left to do. It removes the bundle's
mount, and the virtual machine only when no shim serves it any more or containerd has given up the whole sandbox. It can
be repeated. Only the answer goes to stdout; errors go to stderr.

The usual case costs one umount; the modules that read the state are imported only where there is something to clean.
"""

import contextlib
import os
import signal
import sys
import time

from pyshim.cleanup.dead_socket import remove_dead_socket
from pyshim.host.mounts.table import unmount_all
from pyshim.start import spec, wire
from pyshim.start.argv import Invocation
from pyshim.start.errors import BootstrapError, os_failure

STATE_ROOT = "/run/vc/sbs"
REGISTER = "/run/pyshim/sandboxes"
EXIT_KILLED = 128 + signal.SIGKILL
DEADLINE_S = 4.0
"""Seconds from the start of this process: containerd kills `delete` after five, and an answer without a clean host is
worth more than none."""


def main(call: Invocation, *, state_root: str = STATE_ROOT, register: str = REGISTER) -> int:
    """The exit code of `delete`: 0 when nothing is left that should not be, the answer then being on stdout."""
    deadline = time.monotonic() + DEADLINE_S - _own_age_s()
    # The daemon ends on these; `delete` finishes what it has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    errors: list[str] = []
    answer = delete(call, state_root=state_root, register=register, deadline=deadline, errors=errors)
    for error in errors:
        print(error, file=sys.stderr)
    try:
        while answer:
            answer = answer[os.write(1, answer) :]
    except OSError as error:
        raise os_failure("write answer", "stdout", error) from error
    return 1 if errors else 0


def _own_age_s() -> float:
    """Seconds since this process was started: on a busy node the interpreter takes some of containerd's five.

    Source: proc(5), /proc/pid/stat, field 22, in clock ticks since boot.
    """
    with open("/proc/self/stat", "rb") as file:
        started_ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def delete(call: Invocation, *, state_root: str, register: str, deadline: float, errors: list[str]) -> bytes:
    """The DeleteResponse for `call.id`, whose leftovers are gone except for what `errors` then says.

    The exit is the one in the state; without one, a kill at this moment.
    Raises BootstrapError for a call that does not say what to delete.
    """
    container_id = spec.checked_id(call.id, "flag -id")
    bundle = os.path.abspath(call.bundle or ".")
    sandbox_id = _sandbox_of(container_id, bundle, state_root, register)
    pid, status, exited_at_ns = 0, EXIT_KILLED, time.time_ns()
    if sandbox_id:
        from pyshim.cleanup import leftovers  # imports three times what the usual case needs

        pid, container = leftovers.clean_sandbox(
            sandbox_id,
            container_id,
            address=call.address,
            namespace=call.namespace,
            state_root=state_root,
            register=register,
            deadline=deadline,
            errors=errors,
        )
        if container is not None and container.exit is not None:
            status, exited_at_ns = container.exit.status, container.exit.exited_at_ns
    _unmount_rootfs(bundle, errors)
    _remove_dead_socket(bundle)
    return _answer(pid, status, exited_at_ns)


def _sandbox_of(container_id: str, bundle: str, state_root: str, register: str) -> str:
    """The sandbox whose state, or entry in the register, knows of the container; empty when there is none."""
    candidates = [container_id]
    # A damaged config.json must not keep us from cleaning; the directories below answer as well.
    with contextlib.suppress(BootstrapError):
        candidates.insert(0, spec.group_id(bundle, container_id))
    for candidate in candidates:
        if os.path.lexists(f"{state_root}/{candidate}/persist.json") or os.path.lexists(f"{register}/{candidate}"):
            return candidate
    try:
        names = os.listdir(state_root)
    except OSError:
        return ""
    return next((name for name in names if os.path.isdir(f"{state_root}/{name}/{container_id}")), "")


def _unmount_rootfs(bundle: str, errors: list[str]) -> None:
    rootfs = f"{bundle}/rootfs"
    try:
        unmount_all(rootfs)
    except OSError as error:
        errors.append(str(os_failure("unmount", rootfs, error)))


def _remove_dead_socket(bundle: str) -> None:
    """The socket named by the bundle's `address` file is gone if no process listens on it."""
    try:
        with open(f"{bundle}/address", encoding="utf-8") as file:
            address = file.read(4096).strip()
    except (OSError, ValueError):
        return

    remove_dead_socket(address)


def _answer(pid: int, status: int, exited_at_ns: int) -> bytes:
    """containerd.task.v2.DeleteResponse."""
    timestamp = wire.encode((1, exited_at_ns // 10**9), (2, exited_at_ns % 10**9))
    return wire.encode((1, pid), (2, status), (3, timestamp))
