"""The life of a sandbox: every event in every phase, and every short order of events."""

import asyncio
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from pyshim.concurrency.tasks import TaskOwner
from pyshim.model.errors import FailedPrecondition, ShimError, Unavailable
from pyshim.model.ids import ContainerId, SandboxId
from pyshim.model.observation import Trace
from pyshim.model.sandbox import EndedBy, Phase
from pyshim.pod.life import TABLE, Action, Change, Event, SandboxLife
from pyshim.pod.sandbox import Sandbox

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ARCHITECTURE.md"
EVENTS: tuple[Event, ...] = (*Change, *EndedBy)


class WatchedSandbox:
    """Its start and its end last until a test lets them go on; they must never overlap."""

    def __init__(self) -> None:
        self.may_start, self.may_end = asyncio.Event(), asyncio.Event()
        self.vm_gone = asyncio.Event()
        self.start_error: ShimError | None = None
        self.busy = False
        self.is_left = False
        self.watches = self.ends = 0

    async def start(self) -> None:
        assert not self.busy
        self.busy = self.is_left = True
        try:
            await self.may_start.wait()
            if self.start_error is not None:
                raise self.start_error
        finally:
            self.busy = False

    def watch(self, _lost: object) -> None:
        self.watches += 1

    def begin_end(self, _failure: str) -> None:
        self.vm_gone.clear()

    async def end(self, _failure: str) -> None:
        assert not self.busy, "what is being made is not undone yet"
        self.busy = True
        await self.may_end.wait()
        self.busy = self.is_left = False
        self.ends += 1
        self.vm_gone.set()


class Stage:
    """A life, its sandboxes, and who listens to it."""

    def __init__(self) -> None:
        self.tasks = TaskOwner()
        self.sandboxes: list[WatchedSandbox] = []
        self.heard: list[EndedBy] = []
        self.times_gone = 0
        self.callers: list[asyncio.Future[Any]] = []
        self.life = SandboxLife(
            SandboxId("p1"),
            owner=ContainerId("p1"),
            tasks=self.tasks,
            trace=Trace(lambda: 1),
            clock_ns=lambda: 5,
            listener=self,
        )

    def sandbox_ends(self, by: EndedBy) -> None:
        self.heard.append(by)

    def sandbox_is_gone(self) -> None:
        self.times_gone += 1

    async def start(self) -> None:
        self.sandboxes.append(WatchedSandbox())
        self.life.sandbox = cast(Sandbox, self.sandboxes[-1])
        await self.sandboxes[-1].start()

    def open(self) -> None:
        self.callers.append(asyncio.ensure_future(self.life.open(self.start)))

    async def reach(self, phase: Phase) -> None:
        """The life is in `phase`, by way of the phases before it."""
        if phase is not Phase.NEW:
            self.open()
            await settle()
        if phase in (Phase.RUNNING, Phase.ENDING, Phase.ENDED):
            self.sandboxes[-1].may_start.set()
            await settle()
        if phase in (Phase.ENDING, Phase.ENDED):
            self.life.begin_end(EndedBy.OWNER)
        if phase is Phase.ENDED:
            self.sandboxes[-1].may_end.set()
            await settle()
        assert self.life.phase is phase

    async def close(self) -> None:
        for sandbox in self.sandboxes:
            sandbox.may_start.set()
            sandbox.may_end.set()
        await self.tasks.close()
        await asyncio.gather(*self.callers, return_exceptions=True)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_every_event_has_a_step_in_every_phase() -> None:
    assert {event: set(steps) for event, steps in TABLE.items()} == {event: set(Phase) for event in EVENTS}


def test_the_page_has_the_same_table() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `(open|opened|owner|lost|failed|undone|gone)`", line)
    ]
    page = {
        (event, phase): cell
        for events, *cells in rows
        for event in re.findall(r"`(\w+)`", events)
        for phase, cell in zip(Phase, cells, strict=True)
    }

    def shown(phase: Phase, event: Event) -> str:
        step = TABLE[event][phase]
        if step.phase is phase and step.action is Action.NOTHING:
            return "-"
        return f"{step.action}" if step.phase is phase else f"{step.action}: {step.phase}".removeprefix("-: ")

    assert page == {(event, phase): shown(phase, event) for event in EVENTS for phase in Phase}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", Phase)
async def test_an_event_has_the_steps_effect_and_no_other(phase: Phase, event: Event) -> None:
    stage = Stage()
    await stage.reach(phase)
    life, wanted = stage.life, TABLE[event][phase]
    sandbox = stage.sandboxes[-1] if stage.sandboxes else None
    if sandbox is not None and wanted.action is Action.RETRY:
        sandbox.is_left = True
        sandbox.may_end.clear()
    made, watched, heard, reported = (
        *(len(stage.sandboxes), sandbox.watches if sandbox else 0),
        *(len(stage.heard), life.exit.done()),
    )

    if event is Change.OPEN:
        stage.open()
    elif event is Change.OPENED and phase is Phase.OPENING and sandbox is not None:
        sandbox.may_start.set()
    elif event in (Change.GONE, Change.UNDONE) and phase is Phase.ENDING and sandbox is not None:
        life.ended_by = EndedBy.FAILED if event is Change.UNDONE else EndedBy.STOP
        sandbox.may_end.set()
    elif event is EndedBy.LOST:
        life.lost("vm", "qemu died")
    elif isinstance(event, EndedBy):
        life.begin_end(event)
    else:
        life._take(event)  # no one sends it in this phase
    phases = life.phase
    await settle()

    assert wanted.phase in (life.phase, phases)
    assert len(stage.sandboxes) - made == (wanted.action is Action.OPEN)
    assert (sandbox.watches if sandbox else 0) - watched == (wanted.action is Action.WATCH)
    assert stage.heard[heard:] == ([event] if wanted.action is Action.END else [])
    assert life.exit.done() - reported == (wanted.action is Action.REPORT)
    if sandbox is not None:
        assert sandbox.busy == (phase is Phase.OPENING and wanted.phase is Phase.OPENING) or wanted.action in (
            *(Action.END, Action.RETRY, Action.REFUSE, Action.JOIN),
            *((Action.NOTHING,) if phase is Phase.ENDING else ()),
        )
    refused = [each for each in stage.callers if each.done() and isinstance(each.exception(), FailedPrecondition)]
    assert len(refused) == (wanted.action is Action.REFUSE)
    await stage.close()


MOVES: dict[str, Callable[[Stage], object]] = {
    "open": Stage.open,
    "started": lambda stage: stage.sandboxes and stage.sandboxes[-1].may_start.set(),
    "broken": lambda stage: stage.sandboxes and _break(stage.sandboxes[-1]),
    "undone": lambda stage: stage.sandboxes and stage.sandboxes[-1].may_end.set(),
    "lost": lambda stage: stage.life.lost("vm", "qemu died"),
    **{str(by): lambda stage, by=by: stage.life.begin_end(by) for by in (EndedBy.STOP, EndedBy.FAILED)},
}


def _break(sandbox: WatchedSandbox) -> None:
    sandbox.start_error = Unavailable("no vm")
    sandbox.may_start.set()


async def test_in_every_order_the_first_end_counts_and_start_and_end_never_overlap() -> None:
    """Orders of three events; `WatchedSandbox` fails for an overlap."""
    for moves in product(MOVES, repeat=3):
        stage = Stage()
        for move in moves:
            MOVES[move](stage)
            await settle()
        life = stage.life
        assert life.exit.done() == (life.phase is Phase.ENDED), moves
        assert len([by for by in stage.heard if by is not EndedBy.FAILED]) <= 1, moves

        for sandbox in stage.sandboxes:
            sandbox.may_start.set()
            sandbox.may_end.set()
        await life.end(EndedBy.SHUTDOWN)

        assert life.phase is Phase.ENDED, moves
        assert not any(sandbox.is_left for sandbox in stage.sandboxes), moves
        reasons = [by for by in stage.heard if by is not EndedBy.FAILED]
        assert not reasons or life.ended_by is reasons[0], moves
        assert not life.is_active
        await stage.close()


async def test_a_caller_that_gives_up_does_not_cancel_the_opening() -> None:
    stage = Stage()
    await stage.reach(Phase.OPENING)
    stage.open()
    await settle()
    stage.callers[0].cancel()
    stage.sandboxes[-1].may_start.set()
    await settle()

    assert stage.life.phase is Phase.RUNNING
    assert stage.callers[1].result() is stage.life.sandbox
    await stage.close()


async def test_what_could_not_be_undone_is_tried_again_by_the_next_end() -> None:
    stage = Stage()
    await stage.reach(Phase.ENDED)
    (sandbox,) = stage.sandboxes
    sandbox.is_left = True

    await stage.life.end(EndedBy.SHUTDOWN)

    assert (sandbox.ends, stage.times_gone, stage.life.ended_by) == (2, 2, EndedBy.OWNER)
    await stage.close()
