"""The QEMU process of one VM: its QMP connection, its end, and how the VM ended.

The VM has ended when its process has exited. QMP events before the exit contain the cause. So after the exit `_watch`
reads QMP and the consoles to their ends, and only then decides how the VM ended.
"""

import asyncio
import logging
import socket
from contextlib import suppress

import msgspec

from hypervisors.qemu.console import Console, names_panic
from hypervisors.qemu.devices import AGENT_PORT_ID
from hypervisors.qemu.memory import dump_memory
from hypervisors.qemu.qmp import Monitor, QmpEvent
from pyshim.concurrency.tasks import cancel_all
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.children import Child
from pyshim.model.errors import DeadlineExceeded, Internal, ShimError, Unavailable
from pyshim.model.vm import LocalVm, MemoryDump, VmExit, VmExitKind

log = logging.getLogger(__name__)

QUIT_GRACE_S = 2.0
"""Seconds for QEMU to answer `quit`, and then to exit."""
_LAST_EVENTS_S = 2.0
"""Seconds between the exit of QEMU and the end of its QMP connection, whichever is seen first."""
_LOST_CONTROL_GRACE_S = 2.0
"""Seconds for QEMU to exit after its QMP connection has ended; then it is killed."""
_LOST_VSOCK_GRACE_S = 0.1
"""Seconds for QEMU to exit after the vsock program. The program ends with QEMU, and its exit may be seen first."""


class VmStartFailed(Internal):
    """QEMU did not start; the text quotes its last output."""


class VmStartTimedOut(DeadlineExceeded):
    """QEMU runs but does not answer."""


class QemuProcess:
    """One QEMU from its start to its exit."""

    def __init__(self, config: LocalVm, child: Child, console: Console, vsock_program: Child | None) -> None:
        self.monitor = Monitor(name=config.sandbox_id, on_event=self._on_event)
        self.agent_port_opened = asyncio.Event()
        """Set once the guest has opened the agent's serial port."""
        self._config = config
        self._child = child
        self._console = console
        self._vsock_program = vsock_program
        self._facts = ExitFacts()
        self._watcher: asyncio.Task[VmExit] | None = None
        self._dumping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit(self) -> VmExit | None:
        """How the VM ended; None while it runs."""
        return self._watcher.result() if self._watcher is not None and self._watcher.done() else None

    async def connect(self, connection: socket.socket) -> None:
        """QMP answers on `connection`.

        Raises VmStartFailed with QEMU's last output once it has exited, VmStartTimedOut when it does not answer.
        """
        sandbox_id = self._config.sandbox_id
        try:
            await self.monitor.connect(connection, self._config.start_timeout_s)
        except ShimError as error:
            await self.await_exit_after(error)
            # QEMU waits for the vsock program's answer; if the program has exited, its output has the cause.
            output = "; ".join(each.describe_exit() for each in (self._child, self._vsock_program) if each is not None)
            if self._child.exit is not None:
                raise VmStartFailed(f"start vm {sandbox_id!r}: {output}") from error
            kind = VmStartTimedOut if isinstance(error, DeadlineExceeded) else VmStartFailed
            raise kind(f"start vm {sandbox_id!r}: {error}; {output}") from error
        self._watcher = asyncio.create_task(self._watch(), name=f"watch/vm/{sandbox_id}")
        version = ".".join(map(str, self.monitor.version))
        log.info("vmm started", extra={"sandbox": sandbox_id, "pid": self.pid, "qemu": version})

    async def wait(self) -> VmExit | None:
        """How the VM ended, once it has; None if `connect` did not succeed."""
        return await asyncio.shield(self._watcher) if self._watcher is not None else None

    def request_stop(self) -> None:
        """From now on, the end of the VM counts as requested."""
        self._facts.stop_requested = True

    async def stop(self) -> None:
        """QEMU has exited, after the command `quit` or by SIGKILL; `exit` is set if `connect` had succeeded."""
        await self._end()
        await self.wait()

    async def await_exit_after(self, error: Exception) -> None:
        """If `error` is a closed connection, waits for the exit that closed it: either may be seen first."""
        await self._exited_within(_LAST_EVENTS_S if isinstance(error, Unavailable) else 0)

    def describe_exit(self) -> str:
        """How the process exited, and its last output, for error texts."""
        return self._child.describe_exit()

    async def _end(self) -> None:
        if self.monitor.is_open:
            quits = True
            try:
                await self.monitor.quit(QUIT_GRACE_S)
            except ShimError as error:
                log.warning("qemu does not quit", extra={"sandbox": self._config.sandbox_id, "error": str(error)})
                quits = isinstance(error, Unavailable)  # it exited before it could answer
            if quits:
                await self._exited_within(QUIT_GRACE_S)
        await self._child.end()

    async def _exited_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._child.wait()

    async def _watch(self) -> VmExit:
        """Waits for the end of the VM. Kills a QEMU that has lost its QMP connection or its vsock."""
        sandbox_id, child = self._config.sandbox_id, self._child
        ended = asyncio.create_task(child.wait(), name=f"watch/vm/{sandbox_id}/process")
        closed = asyncio.create_task(self.monitor.closed(), name=f"watch/vm/{sandbox_id}/qmp")
        lost_vsock = asyncio.create_task(self._lost_vsock(), name=f"watch/vm/{sandbox_id}/vsock")
        await asyncio.wait({ended, closed, lost_vsock}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            lost_qmp = closed.done()
            await asyncio.wait({ended}, timeout=_LOST_CONTROL_GRACE_S if lost_qmp else _LOST_VSOCK_GRACE_S)
            if not ended.done():
                self._facts.lost_control = (
                    f"lost control of qemu: qmp connection {closed.result()}" if lost_qmp else lost_vsock.result()
                )
                child.kill()
        await ended
        await cancel_all(lost_vsock, *([self._dumping] if self._dumping is not None else []))
        await asyncio.wait({closed}, timeout=_LAST_EVENTS_S)
        await self.monitor.close()
        await closed
        self._console.drain()
        self._facts.console = self._console.lines()
        self._facts.process_exit = child.describe_exit()
        result = vm_exit(sandbox_id, self._facts)
        log.info("vm ended", extra={"sandbox": sandbox_id, "kind": str(result.kind), "pid": child.pid})
        return result

    async def _lost_vsock(self) -> str:
        """Waits for the exit of the vsock program, if there is one, and returns how it ended."""
        if self._vsock_program is None:
            await asyncio.Event().wait()
        assert self._vsock_program is not None
        await self._vsock_program.wait()
        return f"lost the guest's vsock: {self._vsock_program.describe_exit()}"

    def _on_event(self, event: QmpEvent) -> None:
        match event.name:
            case "GUEST_PANICKED":
                self._facts.panic_event = True
                if self._config.memory_dump is not None and self._dumping is None:
                    name = f"dump/vm/{self._config.sandbox_id}"
                    self._dumping = asyncio.create_task(self._dump_and_end(self._config.memory_dump), name=name)
            case "SHUTDOWN":
                self._facts.shutdown_cause = event.text("reason")
            case "VSERPORT_CHANGE":
                if event.text("id") == AGENT_PORT_ID and event.data.get("open") is True:
                    self.agent_port_opened.set()
                return
            case _:
                return
        log.info("vm event", extra={"sandbox": self._config.sandbox_id, "event": event.name})

    async def _dump_and_end(self, plan: MemoryDump) -> None:
        """QEMU, which the panic has paused, has written the guest's memory, unless that failed, and has exited."""
        facts = {"sandbox": self._config.sandbox_id}
        try:
            path = await dump_memory(self.monitor, plan, self._config.sandbox_id)
            log.info("guest memory dumped", extra={**facts, "path": path})
        except OSError as error:
            cause = describe_os_error(error)
            log.warning("guest memory not dumped", extra={**facts, "error": f"{plan.directory!r}: {cause}"})
        except ShimError as error:
            log.warning("guest memory not dumped", extra={**facts, "error": str(error)})
        await self._end()


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
