"""`delete`: containerd's request to clean up after a container whose shim has gone, or is just going.

containerd runs it after every task, for up to five seconds, mostly with nothing left to do. For a container of a pod
whose shim lives, `pyshim/start/delete.py` has answered already. It removes the bundle's mount, and the virtual machine
only when no shim serves it any more or containerd has given up the whole sandbox. It can be repeated. Only the answer
goes to stdout; errors go to stderr.

The usual case costs one umount. Where there is something to clean, another process does it, made before anything that
takes time: it imports the modules, reads the state and undoes the ledger. This one waits for it, and answers when it is
done or when containerd's seconds are over. So what is left is undone also when the node is so busy that the seconds do
not suffice, or when containerd kills this process.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from pyshim.cleanup.background import Outcome, Report, Reporter, Work, run_in_background
from pyshim.cleanup.sockets import remove_dead_socket
from pyshim.host.mounts.table import has_mount, unmount_all
from pyshim.host.processes.stat import start_ticks_of
from pyshim.model.places import REGISTER, STATE_ROOT
from pyshim.start.delete import delete_response, recorded_exit
from pyshim.start.invocation import CommandError, Invocation, checked_id, group_id, os_failure

CarryOut = Callable[[Work, str, float], Outcome]
"""The type of `run_in_background`: takes the work, its name in errors, and the time until which to wait for it."""
DEADLINE_S = 3.0
"""Seconds from the start of this process until the answer: containerd kills `delete` after five, on busy nodes, too."""


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
    """Seconds since this process was started: on a busy node the interpreter takes some of containerd's five."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks_of("self") / os.sysconf("SC_CLK_TCK")


def delete(
    call: Invocation,
    *,
    state_root: str,
    register: str,
    deadline: float,
    errors: list[str],
    carry_out: CarryOut = run_in_background,
) -> bytes:
    """The DeleteResponse for `call.id`. Its leftovers are gone, or the process that stderr names undoes them.

    Undo steps that failed are in `errors`.

    The exit is the one in the state; without one, a kill at this moment.
    Raises CommandError for a call that does not say what to delete.
    """
    container_id = checked_id(call.id, "flag -id")
    bundle = os.path.abspath(call.bundle or ".")
    sandbox_id = _sandbox_of(container_id, bundle, state_root, register)
    # Read here: on a busy node the other process may not come to it within containerd's seconds.
    exited = recorded_exit(call, sandbox_id, state_root=state_root)
    if sandbox_id:

        def clean(report: Reporter) -> None:
            from pyshim.cleanup.leftovers import clean_sandbox  # three times the imports of the usual case

            clean_sandbox(
                sandbox_id,
                container_id,
                address=call.address,
                namespace=call.namespace,
                state_root=state_root,
                register=register,
                report=report,
            )

        outcome = carry_out(clean, f"clean sandbox {sandbox_id!r}", deadline)
        errors += outcome.errors
        _print_notes(sandbox_id, outcome)
    errors += _unmount_rootfs(bundle, carry_out, deadline)
    _remove_dead_socket(bundle)
    return delete_response(*exited)


def _print_notes(sandbox_id: str, outcome: Outcome) -> None:
    if outcome.pid:
        usual = f"sandbox {sandbox_id!r}: process {outcome.pid} goes on with undoing what is left of it"
        print(outcome.waits_for or usual, file=sys.stderr)
    for note in outcome.notes:
        print(note, file=sys.stderr)


def _sandbox_of(container_id: str, bundle: str, state_root: str, register: str) -> str:
    """The sandbox whose state, or entry in the register, names the container; empty without one."""
    candidates = [container_id]
    # A damaged config.json must not keep us from cleaning; the directories below answer as well.
    with contextlib.suppress(CommandError):
        candidates.insert(0, group_id(bundle, container_id))
    for candidate in candidates:
        if os.path.lexists(f"{state_root}/{candidate}/persist.json") or os.path.lexists(f"{register}/{candidate}"):
            return candidate
    try:
        names = os.listdir(state_root)
    except OSError:
        return ""
    return next((name for name in names if os.path.isdir(f"{state_root}/{name}/{container_id}")), "")


def _unmount_rootfs(bundle: str, carry_out: CarryOut, deadline: float) -> list[str]:
    """Nothing is mounted on the bundle's root, or the unmount goes on; returns errors.

    The end of an overlay waits until the disk has what was written to it, which may take longer than containerd waits.
    """
    rootfs = f"{bundle}/rootfs"

    def unmount(report: Reporter) -> None:
        try:
            unmount_all(rootfs)
        except OSError as error:
            report(Report.ERROR, str(os_failure("unmount", rootfs, error)))

    try:
        return carry_out(unmount, f"unmount {rootfs!r}", deadline).errors if has_mount(rootfs) else []
    except OSError as error:
        return [str(os_failure("unmount", rootfs, error))]


def _remove_dead_socket(bundle: str) -> None:
    """The socket named by the bundle's `address` file is gone if no process listens on it."""
    try:
        with open(f"{bundle}/address", encoding="utf-8") as file:
            address = file.read(4096).strip()
    except (OSError, ValueError):
        return

    remove_dead_socket(address)
