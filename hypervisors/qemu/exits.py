"""Decides how a VM ended from the clues collected while it ran. Pure."""

import msgspec

from hypervisors.qemu.console import names_panic
from pyshim.model.vm import VmExit, VmExitKind

SHOWN_LINES = 15
_LINES_BEFORE_PANIC = 3

# QEMU's ShutdownCause (qapi/run-state.json) when the guest itself did it.
_GUEST_CAUSES = frozenset({"guest-shutdown", "guest-reset"})


class ExitClues(msgspec.Struct, kw_only=True):
    """Collected while the VM lives; `vm_exit` reads them once it has ended."""

    sandbox_id: str
    stop_requested: bool = False
    panic_event: bool = False
    shutdown_cause: str = ""
    lost_control: str = ""
    """The reason why QMP ended while QEMU still ran, which was then killed."""
    process_end: str = ""
    console: tuple[str, ...] = ()


def vm_exit(clues: ExitClues) -> VmExit:
    """The kind and one sentence. A request of ours explains everything after it.

    Without the guest's pvpanic driver a panic looks like a reboot (`panic=1`, -no-reboot): there the console decides.
    """
    vm = f"vm {clues.sandbox_id!r}"
    console = _console_text(clues.console)
    if clues.stop_requested:
        return VmExit(kind=VmExitKind.REQUESTED, reason=f"{vm} was stopped")
    if clues.panic_event or clues.shutdown_cause == "guest-panic":
        return VmExit(kind=VmExitKind.GUEST_PANIC, reason=f"{vm}: the guest's kernel panicked{console}")
    if clues.lost_control:
        return VmExit(kind=VmExitKind.VMM_DIED, reason=f"{vm}: {clues.lost_control}; {clues.process_end}{console}")
    if clues.shutdown_cause in _GUEST_CAUSES:
        if clues.shutdown_cause == "guest-reset" and names_panic(clues.console):
            return VmExit(kind=VmExitKind.GUEST_PANIC, reason=f"{vm}: the guest's kernel panicked{console}")
        verb = "powered off" if clues.shutdown_cause == "guest-shutdown" else "reset"
        return VmExit(kind=VmExitKind.GUEST_SHUTDOWN, reason=f"{vm}: the guest {verb}{console}")
    cause = f" ({clues.shutdown_cause})" if clues.shutdown_cause else ""
    return VmExit(kind=VmExitKind.VMM_DIED, reason=f"{vm}: {clues.process_end}{cause}{console}")


def _worth_showing(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last lines; of a panic the first ones, because its call trace says less than its message."""
    panic = next((index for index, line in enumerate(lines) if names_panic((line,))), None)
    if panic is None:
        return lines[-SHOWN_LINES:]
    first = max(panic - _LINES_BEFORE_PANIC, 0)
    return lines[first : first + SHOWN_LINES]


def _console_text(lines: tuple[str, ...]) -> str:
    shown = _worth_showing(lines)
    return "; last console lines:\n" + "\n".join(shown) if shown else "; its console is empty"
