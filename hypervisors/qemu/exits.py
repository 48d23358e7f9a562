"""Decides how a VM ended from the facts collected while it ran. Pure."""

import msgspec

from hypervisors.qemu.console import names_panic
from pyshim.model.vm import VmExit, VmExitKind

SHOWN_LINES = 15
_LINES_BEFORE_PANIC = 3

# QEMU's ShutdownCause (qapi/run-state.json) when the guest itself did it.
_GUEST_CAUSES = frozenset({"guest-shutdown", "guest-reset"})


class ExitFacts(msgspec.Struct, kw_only=True):
    """Collected while the VM lives; `vm_exit` reads them once it has ended."""

    stop_requested: bool = False
    panic_event: bool = False
    shutdown_cause: str = ""
    lost_control: str = ""
    """The reason why QMP ended while QEMU still ran, which was then killed."""
    process_exit: str = ""
    console: tuple[str, ...] = ()


def vm_exit(sandbox_id: str, facts: ExitFacts) -> VmExit:
    """The kind and one sentence. A request of ours explains everything after it.

    Without the guest's pvpanic driver a panic looks like a reboot (`panic=1`, -no-reboot): there the console decides.
    """
    vm = f"vm {sandbox_id!r}"
    console = _console_text(facts.console)
    if facts.stop_requested:
        return VmExit(kind=VmExitKind.REQUESTED, reason=f"{vm} was stopped")
    if facts.panic_event or facts.shutdown_cause == "guest-panic":
        return VmExit(kind=VmExitKind.GUEST_PANIC, reason=f"{vm}: the guest's kernel panicked{console}")
    if facts.lost_control:
        return VmExit(kind=VmExitKind.VMM_DIED, reason=f"{vm}: {facts.lost_control}; {facts.process_exit}{console}")
    if facts.shutdown_cause in _GUEST_CAUSES:
        if facts.shutdown_cause == "guest-reset" and names_panic(facts.console):
            return VmExit(kind=VmExitKind.GUEST_PANIC, reason=f"{vm}: the guest's kernel panicked{console}")
        verb = "powered off" if facts.shutdown_cause == "guest-shutdown" else "reset"
        return VmExit(kind=VmExitKind.GUEST_SHUTDOWN, reason=f"{vm}: the guest {verb}{console}")
    cause = f" ({facts.shutdown_cause})" if facts.shutdown_cause else ""
    return VmExit(kind=VmExitKind.VMM_DIED, reason=f"{vm}: {facts.process_exit}{cause}{console}")


def _shown_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last lines; of a panic the first ones, because its call trace says less than its message."""
    panic = next((index for index, line in enumerate(lines) if names_panic((line,))), None)
    if panic is None:
        return lines[-SHOWN_LINES:]
    first = max(panic - _LINES_BEFORE_PANIC, 0)
    return lines[first : first + SHOWN_LINES]


def _console_text(lines: tuple[str, ...]) -> str:
    shown = _shown_lines(lines)
    return "; last console lines:\n" + "\n".join(shown) if shown else "; its console is empty"
