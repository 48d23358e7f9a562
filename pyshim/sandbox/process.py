"""One process of a container, init or exec: its status, its streams, its latched exit.

Ordering rules, each with a test named after it:
- the exit is latched once and final before any waiter, State or event can see it;
- output is complete before the exit is latched (bounded: a grandchild that holds the pipe does not hold the exit);
- a start is published before the exit even when the process dies during Start.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from pyshim.model.errors import AgentGone, FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import ContainerId, ExecId, HostPath
from pyshim.model.lifecycle import can_become
from pyshim.model.snapshot import StreamPositions
from pyshim.model.task import ExitStatus, ProcessState, Status, Stdio
from pyshim.sandbox.deadlines import within
from pyshim.sandbox.seams import ContainerAgent, ProcessStreams
from pyshim.sandbox.stdio import Progress, pump_input, pump_output
from pyshim.sandbox.tasks import TaskOwner, cancel_all

log = logging.getLogger("pyshim.sandbox.process")

DRAIN_IDLE_S = 3.0
"""After the process has ended, its output counts as complete when no byte moved for this long: seconds, since a guest
on a crowded node may need one to answer a read that has data."""
READER_PATIENCE_S = 10.0
"""The same while a reader is slow to take what there is; containerd's runc shim waits as long."""
CLOSE_DRAIN_S = 4.0
"""Delete's part of it: the kubelet gives Delete ten seconds for everything."""
STREAMS_S = 5.0
"""For a log program to end after its input has; it is killed after one second."""
EXIT_SANDBOX_LOST = 255
EXIT_KILLED = 137


class Process:
    """Constructed with its streams open and the guest side created (init) or still to be created (exec)."""

    def __init__(
        self,
        *,
        container_id: ContainerId,
        exec_id: ExecId | None,
        bundle: HostPath,
        pid: int,
        stdio: Stdio,
        streams: ProcessStreams,
        agent: ContainerAgent,
        tasks: TaskOwner,
        clock_ns: Callable[[], int],
    ) -> None:
        self.container_id = container_id
        self.exec_id = exec_id
        self.pid = pid
        self.stdio = stdio
        self.status = Status.CREATED
        self.exit: ExitStatus | None = None
        self._reported: int | None = None
        """The status the guest has told, known before the output has drained and the exit is latched."""
        self.agent_gone = False
        """The guest was lost while this process ran: its exit is not known."""
        self.lock = asyncio.Lock()
        self._bundle = bundle
        self._streams = streams
        self._agent = agent
        self._tasks = tasks
        self._clock_ns = clock_ns
        self._exited = asyncio.Event()
        self._ended = asyncio.Event()
        self._progress = Progress()
        self._outputs: list[asyncio.Task[None]] = []
        self._input: asyncio.Task[None] | None = None
        self._resize: asyncio.Task[None] | None = None
        self._wanted_size: tuple[int, int] | None = None

    @property
    def guest_id(self) -> str:
        """The agent's name of the process: kata-agent knows an init by its container's id."""
        return self.exec_id or self.container_id

    @property
    def label(self) -> str:
        """For errors and task names."""
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
    def moved(self) -> StreamPositions:
        """What has reached its reader, by stream."""
        progress = self._progress
        return StreamPositions(progress.stdin_bytes, progress.stdout_bytes, progress.stderr_bytes)

    def _count_stdout(self, count: int) -> None:
        self._progress.stdout_bytes += count

    def _count_stderr(self, count: int) -> None:
        self._progress.stderr_bytes += count

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

        async def stdout(max_bytes: int) -> bytes | memoryview:
            return await agent.read_stdout(self.container_id, self.guest_id, max_bytes)

        async def stderr(max_bytes: int) -> bytes | memoryview:
            return await agent.read_stderr(self.container_id, self.guest_id, max_bytes)

        self._outputs.append(
            self._pump("stdout", partial(pump_output, stdout, streams.stdout, self._progress, count=self._count_stdout))
        )
        if not self.stdio.terminal:
            self._outputs.append(
                self._pump(
                    "stderr", partial(pump_output, stderr, streams.stderr, self._progress, count=self._count_stderr)
                )
            )
        self._input = self._pump("stdin", self._feed_input)
        if self._wanted_size is not None:
            self._resize = self._pump("resize", partial(self._set_size, *self._wanted_size))

    async def _feed_input(self) -> None:
        agent, stream = self._agent, self._streams.stdin

        async def write(data: memoryview) -> int:
            written = await agent.write_stdin(self.container_id, self.guest_id, data)
            self._progress.stdin_bytes += written
            return written

        if stream is not None:
            await pump_input(stream, write)
        if not self.stdio.terminal:  # kata-agent would close the terminal itself, which hangs up on the process
            await agent.close_stdin(self.container_id, self.guest_id)

    def _pump(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._tasks.spawn(f"{name}/{self.label}", self._quiet(name, work))

    async def _quiet(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """A stream that breaks ends quietly: the process may have died under it, or the client gone away."""
        try:
            await work()
        except ShimError as exc:
            log.debug("stream ended", extra={"of": self.label, "stream": name, "error": str(exc)})

    async def wait(self) -> ExitStatus:
        """The exit status, once final; returns at once when it is."""
        await self._exited.wait()
        assert self.exit is not None
        return self.exit

    async def ended(self) -> None:
        """The guest has told its end, or the exit is final for another reason; its output may still be on the way."""
        await self._ended.wait()

    async def watch_exit(self) -> int:
        """The status the guest reports for this process, once it has ended and its output has drained.

        255 when the agent is lost first: nobody can tell how the process ended.
        """
        try:
            status = await self._agent.wait_process(self.container_id, self.guest_id)
        except AgentGone:
            self.agent_gone = True
            return EXIT_SANDBOX_LOST
        except ShimError as exc:
            log.warning("wait failed", extra={"of": self.label, "error": str(exc)})
            return EXIT_SANDBOX_LOST
        self._reported = status
        self._ended.set()
        async with self.lock:  # the guest may tell the end before it replies to the start, which lets the output flow
            pass
        await self._drain_until_idle()
        return status

    async def _drain_until_idle(self) -> None:
        pending = {task for task in self._outputs if not task.done()}
        while pending:
            moves = self._progress.moves
            _, pending = await asyncio.wait(pending, timeout=self._patience_s)
            if pending and self._progress.moves == moves:
                return

    @property
    def _patience_s(self) -> float:
        """How long an ended process's streams may stand still: a slow reader gets more than a held-open pipe."""
        return READER_PATIENCE_S if self._progress.blocked_writes else DRAIN_IDLE_S

    def latch_exit(self, status: int) -> ExitStatus | None:
        """The exit is final and every waiter awake; None when it already was.

        `status` stands for a process of which the guest has told nothing.
        """
        if self.exit is not None:
            return None
        if self._reported is not None:
            status = self._reported
        self.exit = ExitStatus(status=status, exited_at_ns=self._clock_ns())
        self.status = Status.STOPPED
        self._ended.set()
        self._exited.set()
        return self.exit

    async def kill(self, signal: int, *, all_processes: bool) -> None:
        if self.exit is not None:
            raise NotFound(f"signal process '{self.label}': it has already exited")
        if self.exec_id is not None and self.status is Status.CREATED:
            raise FailedPrecondition(f"signal process '{self.label}': it was never started")
        try:
            await self._agent.signal_process(self.container_id, "" if all_processes else self.guest_id, signal)
        except ShimError as exc:
            # The guest has seen the end before we have: the same answer as after the exit. kata-agent knows no
            # particular code for it, so what it told before counts as well.
            if isinstance(exc, NotFound) or self._reported is not None or self.exit is not None:
                raise NotFound(f"signal process '{self.label}': it has already exited") from exc
            raise

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
        """EOF follows the bytes already written to stdin. Idempotent; fine without stdin."""
        if self._streams.stdin is not None:
            self._streams.stdin.close_io()

    async def close_streams(self) -> None:
        """No stream of this process is open. Idempotent. Raises DeadlineExceeded when one does not close.

        Output that still moves, or waits for a slow reader, gets CLOSE_DRAIN_S; a pipe that a grandchild holds open
        no more than the usual patience, since the end of the stream must follow the exit promptly.
        """
        if not all(task.done() for task in self._outputs):
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_DRAIN_S):
                    await self._drain_until_idle()
        tasks = (*self._outputs, self._input, self._resize)
        await cancel_all(*(task for task in tasks if task is not None and not task.done()))
        async with within(STREAMS_S, f"close streams of '{self.label}'"):
            await self._streams.close()
