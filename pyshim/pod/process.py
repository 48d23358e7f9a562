"""One process of a container, init or exec: its status, its streams, its latched exit.

Ordering rules, each with a test named after it:
- the exit is latched once and final before any waiter, State or event can see it;
- output is complete before the exit is latched (bounded: a grandchild that holds the pipe does not hold the exit);
- a start is published before the exit even when the process dies during Start.

When WaitProcess is sent. kata-agent forgets a process when it answers WaitProcess, with all output that was not read by
then. So the call is sent once both outputs have ended, as Kata's shim does. A child that inherits an output keeps it
open after the process has ended; then three things lead to the exit:

- kata-agent ends the reads that wait at the moment of the exit, so one output ends although the child holds both. From
  OUTPUT_GRACE_S after that the shim asks, with a limit of POLL_LIMIT_S in the guest, so that an output is at risk only during POLL_LIMIT_S:
  the process may also have closed one output by itself (`exec 2>&1`) and live on. The pauses double.
- After a KILL the process has ended. Its output is read until it stands still, KILLED_DRAIN_S at most.
- `report_killed` of the container, if the guest does not report the exit after a KILL (`killing.py`).

An agent that keeps output, as our own does, is asked at once. Its reads end when the last writer has closed the output,
so after the process's end the exit waits OUTPUT_GRACE_S for that; what an exec's child writes later is read until Delete.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from pyshim.concurrency.deadlines import within
from pyshim.concurrency.stdio import Progress, pump_input, pump_output
from pyshim.concurrency.tasks import TaskOwner, cancel_all
from pyshim.model.errors import AgentGone, DeadlineExceeded, FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import ExecId
from pyshim.model.seams import ContainerAgent, InputStream, ProcessStreams
from pyshim.model.task import CreateTask, ExitStatus, ProcessState, Status, Stdio, can_become

log = logging.getLogger(__name__)

SIGKILL = 9
_ENDING_SIGNALS = (SIGKILL, 15)
OUTPUT_GRACE_S = 2.7
"""Seconds from the end of one output to the first question for the exit; no whole number, since programs sleep for
whole seconds before they print. containerd's runc shim needs as long for a child that holds the pipe."""
POLL_PAUSE_MAX_S = 600.0
"""Longest pause between two such questions, in seconds."""
POLL_LIMIT_S = 0.1
"""Seconds the agent may wait for the exit when it is asked while an output is open: several round trips."""
DRAIN_IDLE_S = 3.0
"""Seconds without a moved byte after which the output of an ended process counts as complete: a guest on a crowded node
may need one to answer a read that has data."""
SLOW_READER_S = 10.0
"""The same while a slow reader has not taken what was read; containerd's runc shim waits as long."""
KILLED_DRAIN_S = 8.0
"""Seconds for all output after a KILL, whether it moves or not; less than the limits of `killing.py`."""
CLOSE_DRAIN_S = 4.0
"""Seconds for output that still moves at Delete: the kubelet gives Delete ten seconds for everything."""
CLOSE_STREAMS_S = 5.0
"""Seconds for a log program to end after its input has; it is killed after one more second."""
EXIT_SANDBOX_LOST = 255
EXIT_KILLED = 137


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
        """The guest was lost while this process ran: its exit is not known."""
        self.lock = asyncio.Lock()
        self._bundle = container.bundle
        self._streams = streams
        self._input_closed = False
        self._agent = agent
        self._tasks = tasks
        self._clock_ns = clock_ns
        self._exited = asyncio.Event()
        self._wake_watcher = asyncio.Event()
        """Set when the streams start and when a signal may have ended the process; cleared by the exit's watcher."""
        self._killed_at: float | None = None
        """Loop time of the KILL that the agent took last."""
        self._guest_status: int | None = None
        """The exit status from the guest, before it is latched. Open outputs may end with an error then."""
        self._progress = Progress(asyncio.get_running_loop().time)
        self._outputs: list[asyncio.Task[None]] = []
        self._input: asyncio.Task[None] | None = None
        self._resize: asyncio.Task[None] | None = None
        self._wanted_size: tuple[int, int] | None = None

    def attach_streams(self, streams: ProcessStreams) -> None:
        """The process owns these streams."""
        self._streams = streams
        if self._input_closed:
            self.close_io()

    @property
    def guest_id(self) -> str:
        """The agent's name of the process: kata-agent names an init by its container's id."""
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

    @property
    def bytes_by_stream(self) -> Counter[str]:
        """Bytes by stream that have reached their reader."""
        return self._progress.bytes_by_stream

    def become(self, status: Status) -> None:
        """The status is `status`. Raises FailedPrecondition when the lifecycle has no such step."""
        if not can_become(self.status, status):
            raise FailedPrecondition(
                f"change process '{self.label}' to {status.name.lower()}: it is {self.status.name.lower()}"
            )
        self.status = status

    def require(self, *allowed: Status, verb: str) -> None:
        if self.status not in allowed:
            raise FailedPrecondition(f"{verb} process '{self.label}': it is {self.status.name.lower()}")

    def start_streams(self) -> None:
        """Bytes flow; called once the process exists in the guest."""
        agent, streams = self._agent, self._streams
        assert streams is not None, "streams are open before the process runs"

        outputs = [("stdout", agent.read_stdout, streams.stdout)]
        if not self.stdio.terminal:
            outputs.append(("stderr", agent.read_stderr, streams.stderr))
        for name, read, stream in outputs:
            read_bytes = partial(read, self.container_id, self.guest_id)
            self._outputs.append(self._spawn(name, partial(pump_output, read_bytes, stream, self._progress, name)))
        self._input = self._spawn("stdin", partial(self._feed_input, streams.stdin))
        self._wake_watcher.set()
        if self._wanted_size is not None:
            self._resize = self._spawn("resize", partial(self._set_size, *self._wanted_size))

    async def _feed_input(self, stream: InputStream | None) -> None:
        agent = self._agent

        async def write(data: memoryview) -> int:
            written = await agent.write_stdin(self.container_id, self.guest_id, data)
            self._progress.bytes_by_stream["stdin"] += written
            return written

        if stream is not None:
            await pump_input(stream.read, write)
        if not self.stdio.terminal:  # kata-agent would close the terminal itself, which hangs up on the process
            await agent.close_stdin(self.container_id, self.guest_id)

    def _spawn(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._tasks.spawn(f"{name}/{self.label}", self._log_failure(name, work))

    async def _log_failure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """`work` has ended. Its failure is logged: as an error when output is lost by it."""
        try:
            await work()
        except ShimError as exc:
            is_output = name in ("stdout", "stderr")
            is_expected = self._guest_status is not None or self.exit is not None or isinstance(exc, AgentGone)
            level = logging.ERROR if is_output and not is_expected else logging.DEBUG
            log.log(level, "stream broke", extra={"of": self.label, "stream": name, "error": str(exc)})

    async def wait(self) -> ExitStatus:
        """The exit status, once final; returns at once when it is."""
        await self._exited.wait()
        assert self.exit is not None
        return self.exit

    async def watch_exit(self) -> int:
        """The status the guest reports for this process, its output complete or given up.

        255 when the agent is lost first: how the process ended is not known. Returns early once the exit is latched.
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
        async with self.lock:  # a start under way ends first: then its output flows
            self._wake_watcher.clear()
        if await self._agent_keeps_output():
            return await self._wait_then_read()
        now = asyncio.get_running_loop().time
        pause_s, asked_at = OUTPUT_GRACE_S, None
        while self._killed_at is None and not self._has_output_ended():
            pending = self._open_outputs()
            if self._outputs and len(pending) == len(self._outputs):
                await self._wait_for_change(pending, None)
                continue
            asked_at = now() if asked_at is None else asked_at
            if await self._wait_for_change(pending, asked_at + pause_s - now()):
                continue
            if not self._progress.blocked_writes or self._progress.idle_s >= SLOW_READER_S:
                with suppress(DeadlineExceeded):
                    return await self._wait_process(POLL_LIMIT_S)
            asked_at, pause_s = now(), min(2 * pause_s, POLL_PAUSE_MAX_S)
        if self._killed_at is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._killed_at + KILLED_DRAIN_S):
                    await self._drain_until_idle(self._killed_at)
        return await self._wait_process(None)

    async def _agent_keeps_output(self) -> bool:
        try:
            return await self._agent.keeps_output()
        except AgentGone:
            raise
        except ShimError as exc:
            log.debug("agent's features not known", extra={"of": self.label, "error": str(exc)})
            return False

    async def _wait_then_read(self) -> int:
        """The exit status; the process's own output has reached its reader, unless that is too slow."""
        status = await self._wait_process(None)
        while pending := self._open_outputs():
            done, _ = await asyncio.wait(pending, timeout=OUTPUT_GRACE_S)
            is_reader_slow = self._progress.blocked_writes and self._progress.idle_s < SLOW_READER_S
            if not done and not is_reader_slow:
                break
        if pending and self.exec_id is None:  # containerd deletes a container when its output has ended
            await self._agent.end_output(self.container_id, self.guest_id)
        return status

    def _has_output_ended(self) -> bool:
        """The process was started, and all its output has reached the client."""
        return bool(self._outputs) and not self._open_outputs()

    def _open_outputs(self) -> set[asyncio.Task[None]]:
        return {task for task in self._outputs if not task.done()}

    async def _wait_for_change(self, outputs: set[asyncio.Task[None]], limit_s: float | None) -> bool:
        """True if an output has ended or a KILL was taken within the limit."""
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
        return status

    async def _drain_until_idle(self, since: float = 0.0) -> None:
        """No output is open, or none has moved for `_idle_limit_s` seconds since the loop's time `since`."""
        now = asyncio.get_running_loop().time
        while pending := self._open_outputs():
            moves = self._progress.moves
            idle_s = min(self._progress.idle_s, now() - since)
            done, _ = await asyncio.wait(pending, timeout=max(0, self._idle_limit_s - idle_s))
            if not done and self._progress.moves == moves:
                return

    @property
    def _idle_limit_s(self) -> float:
        """Seconds that an ended process's streams may stand still: a slow reader gets more than a pipe held open."""
        return SLOW_READER_S if self._progress.blocked_writes else DRAIN_IDLE_S

    def latch_exit(self, status: int) -> ExitStatus | None:
        """The exit is final and every waiter awake; None when it already was.

        `status` stands for a process whose exit the guest has not reported.
        """
        if self.exit is not None:
            return None
        if self._guest_status is not None:
            status = self._guest_status
        self.exit = ExitStatus(status=status, exited_at_ns=self._clock_ns())
        self.status = Status.STOPPED
        self._exited.set()
        return self.exit

    async def kill(self, signal: int, *, all_processes: bool) -> None:
        """The guest has the signal. A KILL or TERM that meets an ended process is a success; others raise NotFound.

        Signal 0 asks only if the process lives; the guest is not asked.
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
            # The guest has seen the end before the shim has: the same answer as after the exit.
            if isinstance(exc, NotFound) or self._guest_status is not None or self.exit is not None:
                self._check_signal_after_exit(signal, exc)
                return
            raise
        if signal == SIGKILL:
            self._killed_at = asyncio.get_running_loop().time()
        if signal == SIGKILL or self.status is Status.CREATED:
            self._wake_watcher.set()

    def _check_signal_after_exit(self, signal: int, cause: ShimError | None = None) -> None:
        """Kata's rule, on which CRI-O relies: it stops containers that have ended already."""
        if signal not in _ENDING_SIGNALS:
            raise NotFound(f"signal process '{self.label}': it has already exited") from cause

    async def resize(self, width: int, height: int) -> None:
        if self.exit is not None:
            raise FailedPrecondition(f"resize terminal of '{self.label}': the process has exited")
        if not self.stdio.terminal:
            return
        if self.status is Status.CREATED:  # there may be no terminal in the guest yet
            self._wanted_size = (width, height)
        else:
            await self._set_size(width, height)

    async def _set_size(self, width: int, height: int) -> None:
        await self._agent.resize_terminal(self.container_id, self.guest_id, rows=height, columns=width)

    def close_io(self) -> None:
        """EOF follows the bytes already written to stdin. Idempotent; fine without stdin, and before the start."""
        self._input_closed = True
        if self._streams is not None and self._streams.stdin is not None:
            self._streams.stdin.close_io()

    async def close_streams(self) -> None:
        """No stream of this process is open. Idempotent. Raises DeadlineExceeded when one does not close.

        Output that still moves, or waits for a slow reader, gets CLOSE_DRAIN_S. A pipe that a child of the process
        holds open is cut: containerd's drain_exec_sync_io_timeout says how long it is read before Delete.
        """
        if not all(task.done() for task in self._outputs):
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_DRAIN_S):
                    await self._drain_until_idle()
        if self._open_outputs() and self._guest_status is not None and await self._agent_keeps_output():
            self._spawn("end output", partial(self._agent.end_output, self.container_id, self.guest_id))
        tasks = (*self._outputs, self._input, self._resize)
        await cancel_all(*(task for task in tasks if task is not None and not task.done()))
        if self._streams is not None:
            async with within(CLOSE_STREAMS_S, f"close streams of '{self.label}'"):
                await self._streams.close()
