"""The streams of one process: for each a task, its pump, moves bytes between the client and the guest's agent."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from pyshim.concurrency.deadlines import within
from pyshim.concurrency.stdio import Progress, pump_input, pump_output
from pyshim.concurrency.tasks import TaskOwner, cancel_all
from pyshim.model.errors import AgentGone, ShimError
from pyshim.model.seams import ContainerAgent, InputStream, ProcessStreams

log = logging.getLogger(__name__)

DRAIN_IDLE_S = 3.0
"""Seconds without a moved byte after which the output of an ended process is complete. A guest on a crowded node may
need one second to answer a read that has data."""
SLOW_READER_S = 10.0
"""Replaces DRAIN_IDLE_S while the client has not taken what was read; containerd's runc shim waits as long."""
CLOSE_STREAMS_S = 5.0
"""Seconds for a log program to end after its input has; one second later it is killed."""


class Pumps:
    def __init__(
        self,
        *,
        streams: ProcessStreams | None,
        agent: ContainerAgent,
        tasks: TaskOwner,
        container_id: str,
        guest_id: str,
        label: str,
        terminal: bool,
    ) -> None:
        """`guest_id` is the process's id at the agent, `label` its name in logs and errors."""
        self._streams = streams
        self._agent = agent
        self._tasks = tasks
        self._container_id = container_id
        self._guest_id = guest_id
        self._label = label
        self._terminal = terminal
        self.has_process_ended = False
        """Set by the owner. From then on, an output that fails is no loss."""
        self.size_at_start: tuple[int, int] | None = None
        """Width and height of the terminal."""
        self._is_input_closed = False
        self._progress = Progress(asyncio.get_running_loop().time)
        self._outputs: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    @property
    def bytes_by_stream(self) -> Counter[str]:
        """Bytes that have reached their reader."""
        return self._progress.bytes_by_stream

    def attach(self, streams: ProcessStreams) -> None:
        """The pumps have these streams and close them."""
        self._streams = streams
        if self._is_input_closed:
            self.close_input()

    def start(self) -> None:
        """Bytes move in both directions. The process must exist in the guest."""
        agent, streams = self._agent, self._streams
        assert streams is not None, "streams are open before the process runs"

        outputs = [("stdout", agent.read_stdout, streams.stdout)]
        if not self._terminal:
            outputs.append(("stderr", agent.read_stderr, streams.stderr))
        for name, read, stream in outputs:
            read_bytes = partial(read, self._container_id, self._guest_id)
            self._outputs.append(self._spawn(name, partial(pump_output, read_bytes, stream, self._progress, name)))
        self._others.append(self._spawn("stdin", partial(self._feed_input, streams.stdin)))
        if self.size_at_start is not None:
            self._others.append(self._spawn("resize", partial(self.set_size, *self.size_at_start)))

    async def set_size(self, width: int, height: int) -> None:
        await self._agent.resize_terminal(self._container_id, self._guest_id, rows=height, columns=width)

    def close_input(self) -> None:
        """The process reads EOF after the bytes that the client has written. Idempotent; allowed before the start."""
        self._is_input_closed = True
        if self._streams is not None and self._streams.stdin is not None:
            self._streams.stdin.close_io()

    def open_outputs(self) -> set[asyncio.Task[None]]:
        """The pumps of the outputs that have not ended; empty before the start."""
        return {task for task in self._outputs if not task.done()}

    @property
    def have_started(self) -> bool:
        return bool(self._outputs)

    @property
    def is_every_output_open(self) -> bool:
        return bool(self._outputs) and len(self.open_outputs()) == len(self._outputs)

    @property
    def has_every_output_ended(self) -> bool:
        """The client has all output."""
        return bool(self._outputs) and not self.open_outputs()

    @property
    def is_reader_slow(self) -> bool:
        """The client has not taken what was read, and has SLOW_READER_S for it."""
        return self._progress.blocked_writes > 0 and self._progress.idle_s < SLOW_READER_S

    async def drain_until_idle(self, since: float = 0.0) -> None:
        """No output is open, or none has moved for some seconds, which begin at the loop time `since` or later.

        They are DRAIN_IDLE_S, or SLOW_READER_S while the client has not taken what was read.
        """
        now = asyncio.get_running_loop().time
        while pending := self.open_outputs():
            moves = self._progress.moves
            limit_s = SLOW_READER_S if self._progress.blocked_writes else DRAIN_IDLE_S
            idle_s = min(self._progress.idle_s, now() - since)
            done, _ = await asyncio.wait(pending, timeout=max(0, limit_s - idle_s))
            if not done and self._progress.moves == moves:
                return

    def end_output(self) -> None:
        """A task tells an agent that keeps output that no more of it will be read."""
        self._spawn("end output", partial(self._agent.end_output, self._container_id, self._guest_id))

    async def close(self) -> None:
        """Pumps and streams are closed. Idempotent. Raises DeadlineExceeded when a stream does not close."""
        await cancel_all(*(task for task in (*self._outputs, *self._others) if not task.done()))
        if self._streams is not None:
            async with within(CLOSE_STREAMS_S, f"close streams of '{self._label}'"):
                await self._streams.close()

    async def _feed_input(self, stream: InputStream | None) -> None:
        agent = self._agent

        async def write(data: memoryview) -> int:
            written = await agent.write_stdin(self._container_id, self._guest_id, data)
            self._progress.bytes_by_stream["stdin"] += written
            return written

        if stream is not None:
            await pump_input(stream.read, write)
        if not self._terminal:  # kata-agent would close the terminal itself, which hangs up on the process
            await agent.close_stdin(self._container_id, self._guest_id)

    def _spawn(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._tasks.spawn(f"{name}/{self._label}", self._log_failure(name, work))

    async def _log_failure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """`work` has ended. A failure is logged, as an error if output was lost."""
        try:
            await work()
        except ShimError as exc:
            is_output = name in ("stdout", "stderr")
            is_loss = is_output and not self.has_process_ended and not isinstance(exc, AgentGone)
            level = logging.ERROR if is_loss else logging.DEBUG
            log.log(level, "stream broke", extra={"of": self._label, "stream": name, "error": str(exc)})
