"""The life of a pod's sandbox as one value: its phase, what ended it, and its exit.

Theory of operation. A life takes events. `TABLE` says for each event in each phase the next phase and what is done; it
is printed in docs/ARCHITECTURE.md. At most one task works on the sandbox, to open it or to end it. So whoever asks
while it does joins it, and the first reason for an end is the one that counts.

The life is the same for all callers, and each reads it: the Task API, whose sandbox ends with the container that it was
made with (`owner`); the Sandbox API, whose sandbox ends at StopSandbox; CRI-O's Wait; the daemon, which ends when
nothing is left; and, from the state on disk, `pyshim list`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from pyshim.concurrency.tasks import TaskOwner, joined, succeeded
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import ContainerId, SandboxId
from pyshim.model.observation import Trace
from pyshim.model.sandbox import EndedBy, Phase
from pyshim.model.task import EXIT_KILLED, EXIT_SANDBOX_LOST, ExitStatus
from pyshim.pod.sandbox import Sandbox

log = logging.getLogger(__name__)


class Change(StrEnum):
    """The events of a life besides the reasons for its end."""

    OPEN = "open"
    """A caller asks for the running sandbox."""
    OPENED = "opened"
    """The VM runs, and its agent has the sandbox."""
    GONE = "gone"
    """Every step of the end was taken."""
    UNDONE = "undone"
    """Every step of an opening that failed was undone."""


Event = Change | EndedBy


class Action(StrEnum):
    NOTHING = "-"
    OPEN = "open"
    """A task opens the sandbox."""
    JOIN = "join"
    """The caller gets the result of the task under way, or of the one that has ended."""
    REFUSE = "refuse"
    WATCH = "watch"
    """From now on a loss is noticed."""
    END = "end"
    """The opening is cancelled, the containers are reported as ended, a task undoes the sandbox."""
    REPORT = "report"
    """The exit is final, and those who wait for it have it."""
    RETRY = "retry"
    """A task tries again to undo what is left."""


class Step(NamedTuple):
    phase: Phase
    action: Action


def _row(*steps: tuple[Phase, Action]) -> Mapping[Phase, Step]:
    """A step for each phase, in the order of `Phase`."""
    return {phase: Step(*step) for phase, step in zip(Phase, steps, strict=True)}


_NEW, _OPENING, _RUNNING, _ENDING, _ENDED = ((phase, Action.NOTHING) for phase in Phase)
_STAY = (_NEW, _OPENING, _RUNNING, _ENDING, _ENDED)
_END = (Phase.ENDING, Action.END)
_JOIN = (Phase.ENDING, Action.JOIN)
_ASKED = _row((Phase.ENDED, Action.REPORT), _END, _END, _JOIN, (Phase.ENDED, Action.RETRY))

TABLE: Mapping[Event, Mapping[Phase, Step]] = {
    Change.OPEN: _row(
        (Phase.OPENING, Action.OPEN),
        (Phase.OPENING, Action.JOIN),
        (Phase.RUNNING, Action.JOIN),
        (Phase.ENDING, Action.REFUSE),
        (Phase.ENDED, Action.REFUSE),
    ),
    Change.OPENED: _row(_NEW, (Phase.RUNNING, Action.WATCH), *_STAY[2:]),
    EndedBy.OWNER: _ASKED,
    EndedBy.STOP: _ASKED,
    EndedBy.SHUTDOWN: _ASKED,
    EndedBy.LOST: _row(_NEW, _OPENING, _END, _JOIN, _ENDED),  # an opening finds a loss itself, and fails
    EndedBy.FAILED: _row(_NEW, _END, _END, _JOIN, _ENDED),
    Change.UNDONE: _row(_NEW, _OPENING, _RUNNING, _NEW, _ENDED),
    Change.GONE: _row(_NEW, _OPENING, _RUNNING, (Phase.ENDED, Action.REPORT), _ENDED),
}

CONTAINERS_STATUS: Mapping[EndedBy, int] = {
    EndedBy.OWNER: EXIT_KILLED,
    EndedBy.STOP: EXIT_KILLED,
    EndedBy.SHUTDOWN: EXIT_KILLED,
    EndedBy.LOST: EXIT_SANDBOX_LOST,
    EndedBy.FAILED: EXIT_SANDBOX_LOST,
}
"""The exit status of containers that end with the sandbox."""
_STATUS: Mapping[EndedBy, int] = {**CONTAINERS_STATUS, EndedBy.OWNER: 0, EndedBy.STOP: 0}
"""The exit status of the sandbox."""


class LifeListener(Protocol):
    """Hears of an end. Neither call raises."""

    def sandbox_ends(self, by: EndedBy) -> None:
        """Called once, as soon as the end begins: the containers have ended with `CONTAINERS_STATUS`."""

    def sandbox_is_gone(self) -> None:
        """A task that undid the sandbox has ended. Only the state is left, and what could not be undone."""


class SandboxLife:
    def __init__(
        self,
        sandbox_id: SandboxId,
        *,
        owner: ContainerId | None,
        tasks: TaskOwner,
        trace: Trace,
        clock_ns: Callable[[], int],
        listener: LifeListener,
    ) -> None:
        """The container `owner` ends the sandbox when it ends; None: StopSandbox does."""
        self.sandbox_id = sandbox_id
        self.owner = owner
        self.phase = Phase.NEW
        self.ended_by: EndedBy | None = None
        self.failure = ""
        """Why the sandbox was lost; empty while it is not."""
        self.sandbox: Sandbox | None = None
        """Set by the opening, before its first change of the host; stays after the end."""
        self.exit: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        """The sandbox's exit, once it has ended. Shield it from the cancellation of a caller."""
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        """The last opening, until it is undone; or the undo under way."""
        self._trace = trace
        self._clock_ns = clock_ns
        self._listener = listener

    @property
    def outlives_containers(self) -> bool:
        """No container is the sandbox's own: it goes on without any, until StopSandbox."""
        return self.owner is None

    @property
    def is_active(self) -> bool:
        """The sandbox runs, or a task opens or undoes it."""
        return self._task is not None

    @property
    def running(self) -> Sandbox:
        """The sandbox from its opening to its exit. Raises FailedPrecondition before and after."""
        if self.sandbox is None or self.phase not in (Phase.RUNNING, Phase.ENDING):
            state = "has ended" if self.phase is Phase.ENDED else "has not been started"
            raise FailedPrecondition(f"use sandbox '{self.sandbox_id}': it {state}")
        return self.sandbox

    async def open(self, start: Callable[[], Coroutine[Any, Any, None]]) -> Sandbox:
        """The sandbox, which runs; `start` has made it. Joins an opening under way.

        Raises what `start` raised, once what it had made is undone; the sandbox can then be opened again. Raises
        Cancelled when an end cancelled the opening, FailedPrecondition after an end.
        """
        action = f"start sandbox '{self.sandbox_id}'"
        match self._take(Change.OPEN):
            case Action.REFUSE:
                raise FailedPrecondition(f"{action}: it {'is ending' if self.phase is Phase.ENDING else 'has ended'}")
            case Action.OPEN:
                self.ended_by, self.sandbox = None, None
                self._task = self._tasks.spawn(f"open/{self.sandbox_id}", start())
                # Before any caller waits: asyncio runs callbacks in this order, so `_task` is the undo of an opening
                # that failed when `joined` raises.
                self._task.add_done_callback(self._opening_is_over)
        opening = self._task
        assert opening is not None, "OPEN makes it, JOIN finds it"
        try:
            await joined(opening, action)
        except BaseException:
            if opening.done():
                await self.until_idle()
            raise
        assert self.sandbox is not None, "the opening has set it"
        return self.sandbox

    def _opening_is_over(self, opening: asyncio.Task[None]) -> None:
        if not succeeded(opening):
            self.begin_end(EndedBy.FAILED)
        elif self._take(Change.OPENED) is Action.WATCH and self.sandbox is not None:
            self.sandbox.watch(self.lost)

    def lost(self, watcher: str, reason: str) -> None:
        """The sandbox ends, for this reason, if it runs. `watcher` is the part that was found gone."""
        if self.phase is Phase.RUNNING:
            log.error("sandbox lost", extra={"sandbox": self.sandbox_id, "watcher": watcher, "error": reason})
            self.failure = reason
        self.begin_end(EndedBy.LOST)

    async def loss_reason(self, otherwise: str) -> str:
        """Why the sandbox was lost, if that is found soon after a first sign; else `otherwise`."""
        if self.phase is Phase.RUNNING and self.sandbox is not None:
            return await self.sandbox.loss_reason(otherwise)
        return self.failure or otherwise

    async def end(self, by: EndedBy) -> None:
        """The sandbox has ended. Idempotent, also for calls at the same time: the first reason counts."""
        self.begin_end(by)
        await self.until_idle()
        if self.phase is Phase.NEW:  # the end that was joined was that of a failed opening
            self.begin_end(by)

    def begin_end(self, by: EndedBy) -> None:
        """The sandbox ends. `until_idle` waits for it, `until_vm_gone` for a part of it."""
        match self._take(by):
            case Action.END:
                self.ended_by = by
                self._listener.sandbox_ends(by)
                self._undo_after(self._task)
            case Action.RETRY if self.sandbox is not None and self.sandbox.is_left and not self.is_active:
                self._undo_after(None)
            case Action.REPORT:
                self._report(by)

    def _undo_after(self, opening: asyncio.Task[None] | None) -> None:
        if self.sandbox is not None:
            self.sandbox.begin_end(self.failure)
        self._task = self._tasks.supervise(f"end/{self.sandbox_id}", self._undo(opening))
        self._task.add_done_callback(self._undo_is_over)  # before any caller waits, who then finds the new phase

    async def _undo(self, opening: asyncio.Task[None] | None) -> None:
        if opening is not None:
            opening.cancel()  # without an effect if it has ended
            await asyncio.wait([opening])
        if self.sandbox is not None:
            with self._trace.of("end sandbox", saved=False):
                await self.sandbox.end(self.failure)

    def _undo_is_over(self, _: asyncio.Task[None]) -> None:
        by, self._task = self.ended_by, None
        if by is not None and self._take(Change.UNDONE if by is EndedBy.FAILED else Change.GONE) is Action.REPORT:
            self._report(by)
        self._listener.sandbox_is_gone()

    def _report(self, by: EndedBy) -> None:
        self.ended_by = by
        self.exit.set_result(ExitStatus(status=_STATUS[by], exited_at_ns=self._clock_ns()))

    async def until_vm_gone(self) -> None:
        """VM, mounts and network of the ending sandbox are gone; monitor and cgroups may not be."""
        if self.sandbox is not None:
            await self.sandbox.vm_gone.wait()

    async def until_idle(self) -> None:
        """The task under way, if there is one, has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _take(self, event: Event) -> Action:
        self.phase, action = TABLE[event][self.phase]
        return action
