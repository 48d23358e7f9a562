"""Decides how a VM ended. Pure."""

import msgspec

from hypervisors.qemu.console import names_panic
from pyshim.model.vm import VmExit, VmExitKind

SHOWN_LINES = 15
_LINES_BEFORE_PANIC = 3

# QEMU's ShutdownCause (qapi/run-state.json) when the guest itself did it.
_GUEST_CAUSES = frozenset({"guest-shutdown", "guest-reset"})


class ExitFacts(msgspec.Struct, kw_only=True):
    """Facts about the end of a VM, collected while it runs."""

    stop_requested: bool = False
    panic_event: bool = False
    shutdown_cause: str = ""
    lost_control: str = ""
    """Why the shim killed QEMU: its QMP connection or the vsock program ended while it ran."""
    process_exit: str = ""
    console: tuple[str, ...] = ()


def vm_exit(sandbox_id: str, facts: ExitFacts) -> VmExit:
    """The kind of end, and its reason. After a `stop` every end counts as requested.

    Without the guest's pvpanic driver a panic looks like a reboot (`panic=1`, -no-reboot). Then the console decides.
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
    """The last lines; after a panic those from its message on, which says more than the call trace below it."""
    panic = next((index for index, line in enumerate(lines) if names_panic((line,))), None)
    if panic is None:
        return lines[-SHOWN_LINES:]
    first = max(panic - _LINES_BEFORE_PANIC, 0)
    return lines[first : first + SHOWN_LINES]


def _console_text(lines: tuple[str, ...]) -> str:
    shown = _shown_lines(lines)
    return "; last console lines:\n" + "\n".join(shown) if shown else "; its console is empty"
