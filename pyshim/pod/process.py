"""One process of a container, an init or an exec: its status and its exit.

Theory of operation.

`Container` starts the process in the guest, and then its `pumps`, which move bytes between the client and the agent.
Meanwhile `watch_exit` waits for the exit status, and `latch_exit` makes it final. Three rules hold, each with a test
named after it:

- The exit is latched once, and is final before a waiter, State or an event can see it.
- The client has all output before the exit is latched, unless one of the limits below has passed.
- The start is published before the exit, even when the process dies during Start.

The agent reports an exit by its answer to WaitProcess. After that answer kata-agent forgets the process and drops the
output that was not read. So the shim, as Kata's does, sends WaitProcess after both outputs have ended. But a child that
outlives the process keeps the outputs open that it inherited. There are two ways to the exit then:

- One output has ended. At the exit kata-agent ends the reads that wait, so this happens even if a child has both
  outputs open. OUTPUT_GRACE_S later the shim polls: it sends WaitProcess with a limit of POLL_LIMIT_S. It polls because
  the process may have closed one output itself (`exec 2>&1`) and live on; only output that arrives during a poll can be
  lost. The pauses between polls double, up to POLL_PAUSE_MAX_S.
- The agent has taken a KILL, so the process has ended. WaitProcess is sent once no output has moved for some seconds
  (`pumps.py`), at the latest after KILLED_DRAIN_S. If the guest never answers it, `killing.py` reports the exit.

An agent that keeps the output of an ended process, as our own does, gets WaitProcess at once. The exit is then latched
when both outputs have ended, or when none has for OUTPUT_GRACE_S. What a child of an exec writes after that is read
until the exec's Delete.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from pyshim.concurrency.tasks import TaskOwner, cancel_all
from pyshim.model.errors import AgentGone, DeadlineExceeded, FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import ExecId
from pyshim.model.seams import ContainerAgent, ProcessStreams
from pyshim.model.task import EXIT_SANDBOX_LOST, CreateTask, ExitStatus, ProcessState, Status, Stdio, can_become
from pyshim.pod.pumps import Pumps

log = logging.getLogger(__name__)

SIGKILL = 9
_ENDING_SIGNALS = (SIGKILL, 15)
OUTPUT_GRACE_S = 2.7
"""Seconds that an output may stay open after the first sign of the exit. Not a whole number, since programs sleep for
whole seconds before they print. containerd's runc shim waits as long for a child that has the pipe open."""
POLL_PAUSE_MAX_S = 600.0
"""Longest pause between two polls, in seconds."""
POLL_LIMIT_S = 0.1
"""Seconds that the agent may take to answer a poll: several round trips."""
KILLED_DRAIN_S = 8.0
"""Seconds for all output after a KILL, even if bytes still move; less than the limits of `killing.py`."""
CLOSE_DRAIN_S = 4.0
"""Seconds for output that still moves at Delete: the kubelet gives Delete ten seconds for everything."""


class Process:
    """An init, which is in the guest and has its streams; or an exec, which gets both at its start."""

    def __init__(
        self,
        *,
        container: CreateTask,
        exec_id: ExecId | None,
        pid: int,
        stdio: Stdio,
        streams: ProcessStreams | None,
        agent: ContainerAgent,
        tasks: TaskOwner,
        clock_ns: Callable[[], int],
    ) -> None:
        self.container_id = container.container_id
        self.exec_id = exec_id
        self.pid = pid
        self.stdio = stdio
        self.status = Status.CREATED
        self.exit: ExitStatus | None = None
        self.agent_gone = False
        """The agent was lost while this process ran: its exit status is unknown."""
        self.lock = asyncio.Lock()
        self.pumps = Pumps(
            streams=streams,
            agent=agent,
            tasks=tasks,
            container_id=self.container_id,
            guest_id=self.guest_id,
            label=self.label,
            terminal=stdio.terminal,
        )
        self._bundle = container.bundle
        self._agent = agent
        self._clock_ns = clock_ns
        self._exited = asyncio.Event()
        self._wake_watcher = asyncio.Event()
        """Set when the streams start and when a signal may have ended the process; cleared by `watch_exit`."""
        self._killed_at: float | None = None
        """Loop time of the last KILL that the agent has taken."""
        self._guest_status: int | None = None
        """The exit status from the guest, before it is latched."""

    @property
    def guest_id(self) -> str:
        """The process's id at the agent: kata-agent has an init under its container's id."""
        return self.exec_id or self.container_id

    @property
    def label(self) -> str:
        """The process's name in errors and of tasks."""
        return f"{self.container_id}/{self.exec_id}" if self.exec_id else self.container_id

    def state(self) -> ProcessState:
        return ProcessState(
            container_id=self.container_id,
            exec_id=self.exec_id,
            bundle=self._bundle,
            pid=self.pid,
            status=self.status,
            stdio=self.stdio,
            exit=self.exit,
        )

    def become(self, status: Status) -> None:
        """The status is `status`. Raises FailedPrecondition for a step that `model/task.py` does not have."""
        if not can_become(self.status, status):
            raise FailedPrecondition(
                f"change process '{self.label}' to {status.name.lower()}: it is {self.status.name.lower()}"
            )
        self.status = status

    def require(self, *allowed: Status, verb: str) -> None:
        if self.status not in allowed:
            raise FailedPrecondition(f"{verb} process '{self.label}': it is {self.status.name.lower()}")

    def start_pumps(self) -> None:
        """Bytes move, and the exit is watched. The process must exist in the guest."""
        self.pumps.start()
        self._wake_watcher.set()

    async def wait(self) -> ExitStatus:
        """The exit status, once final; returns at once when it is."""
        await self._exited.wait()
        assert self.exit is not None
        return self.exit

    async def watch_exit(self) -> int:
        """The exit status for `latch_exit`, after the output (see above).

        EXIT_SANDBOX_LOST if the guest does not report one, because the agent is lost or answers with an error. Returns
        at once when the exit is latched meanwhile.
        """
        asking = asyncio.ensure_future(self._exit_status())
        latched = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait([asking, latched], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else EXIT_SANDBOX_LOST
        except AgentGone:
            self.agent_gone = True
            return EXIT_SANDBOX_LOST
        except ShimError as exc:
            log.warning("wait failed", extra={"of": self.label, "error": str(exc)})
            return EXIT_SANDBOX_LOST
        finally:
            await cancel_all(asking, latched)

    async def _exit_status(self) -> int:
        await self._wake_watcher.wait()
        async with self.lock:  # a start under way has ended, and its streams have started
            self._wake_watcher.clear()
        if await self._agent_keeps_output():
            return await self._wait_then_read()
        return await self._read_then_wait()

    async def _read_then_wait(self) -> int:
        """The exit status, for an agent that drops the output of an ended process."""
        status = await self._poll_until_output_ends()
        if status is not None:
            return status
        if self._killed_at is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._killed_at + KILLED_DRAIN_S):
                    await self.pumps.drain_until_idle(self._killed_at)
        return await self._wait_process(None)

    async def _poll_until_output_ends(self) -> int | None:
        """The exit status if a poll finds it; None once all output has ended, or the agent has taken a KILL."""
        now = asyncio.get_running_loop().time
        poll_at: float | None = None
        while self._killed_at is None and not self.pumps.has_every_output_ended:
            pending = self.pumps.open_outputs()
            if self.pumps.is_every_output_open:
                await self._wait_for_change(pending, None)
                poll_at = None  # polls before the start say nothing about the process that runs now
                continue
            if poll_at is None:
                pause_s = OUTPUT_GRACE_S
                poll_at = now() + pause_s
            if await self._wait_for_change(pending, poll_at - now()):
                continue
            if not self.pumps.is_reader_slow:
                with suppress(DeadlineExceeded):
                    return await self._wait_process(POLL_LIMIT_S)
            pause_s = min(2 * pause_s, POLL_PAUSE_MAX_S)
            poll_at = now() + pause_s
        return None

    async def _agent_keeps_output(self) -> bool:
        try:
            return await self._agent.keeps_output()
        except AgentGone:
            raise
        except ShimError as exc:
            log.debug("agent's features not known", extra={"of": self.label, "error": str(exc)})
            return False

    async def _wait_then_read(self) -> int:
        """The exit status, for an agent that keeps the output of an ended process."""
        status = await self._wait_process(None)
        while pending := self.pumps.open_outputs():
            done, _ = await asyncio.wait(pending, timeout=OUTPUT_GRACE_S)
            if not done and not self.pumps.is_reader_slow:
                break
        if pending and self.exec_id is None:  # containerd deletes a container only after its output has ended
            await self._agent.end_output(self.container_id, self.guest_id)
        return status

    async def _wait_for_change(self, outputs: set[asyncio.Task[None]], limit_s: float | None) -> bool:
        """True if one of `outputs` has ended, or the watcher was woken, within `limit_s`."""
        changed = asyncio.ensure_future(self._wake_watcher.wait())
        try:
            done, _ = await asyncio.wait([*outputs, changed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(changed)
        self._wake_watcher.clear()
        return bool(done)

    async def _wait_process(self, limit_s: float | None) -> int:
        """The exit status. Raises DeadlineExceeded when the process has not ended within `limit_s`."""
        status = await self._agent.wait_process(self.container_id, self.guest_id, limit_s)
        self._guest_status = status
        self.pumps.has_process_ended = True
        return status

    def latch_exit(self, status: int) -> ExitStatus | None:
        """The exit is final, and every `wait` returns. None when it was latched before.

        `status` counts only if the guest has not reported one.
        """
        if self.exit is not None:
            return None
        if self._guest_status is not None:
            status = self._guest_status
        self.exit = ExitStatus(status=status, exited_at_ns=self._clock_ns())
        self.status = Status.STOPPED
        self.pumps.has_process_ended = True
        self._exited.set()
        return self.exit

    async def kill(self, signal: int, *, all_processes: bool) -> None:
        """The agent has taken the signal; of signal 0 only the checks are made.

        After the exit, KILL and TERM succeed, and other signals raise NotFound.
        """
        if self.exit is not None:
            self._check_signal_after_exit(signal)
            return
        if self.exec_id is not None and self.status is Status.CREATED:
            raise FailedPrecondition(f"signal process '{self.label}': it was never started")
        if not signal:
            return
        try:
            await self._agent.signal_process(self.container_id, "" if all_processes else self.guest_id, signal)
        except ShimError as exc:
            # The guest has seen the exit before the shim has.
            if isinstance(exc, NotFound) or self._guest_status is not None or self.exit is not None:
                self._check_signal_after_exit(signal, exc)
                return
            raise
        if signal == SIGKILL:
            self._killed_at = asyncio.get_running_loop().time()
        if signal == SIGKILL or self.status is Status.CREATED:
            self._wake_watcher.set()

    def _check_signal_after_exit(self, signal: int, cause: ShimError | None = None) -> None:
        """Raises NotFound unless the signal is KILL or TERM. Kata's rule: CRI-O stops containers that have ended."""
        if signal not in _ENDING_SIGNALS:
            raise NotFound(f"signal process '{self.label}': it has already exited") from cause

    async def resize(self, width: int, height: int) -> None:
        if self.exit is not None:
            raise FailedPrecondition(f"resize terminal of '{self.label}': the process has exited")
        if not self.stdio.terminal:
            return
        if self.status is Status.CREATED:  # the guest may have no terminal yet
            self.pumps.size_at_start = (width, height)
        else:
            await self.pumps.set_size(width, height)

    async def close_streams(self) -> None:
        """No stream of this process is open. Idempotent. Raises DeadlineExceeded when one does not close.

        Output that moves, or waits for a slow reader, gets CLOSE_DRAIN_S. Then a pipe that a child of the process has
        open is cut: containerd waits for it before Delete (`drain_exec_sync_io_timeout`).
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DRAIN_S):
                await self.pumps.drain_until_idle()
        if self.pumps.open_outputs() and self._guest_status is not None and await self._agent_keeps_output():
            self.pumps.end_output()
        await self.pumps.close()
