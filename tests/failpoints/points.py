"""The points, their names, and what can happen at them.

A point is `SEAM.CALL:before` or `SEAM.CALL:after`, e.g. `hypervisor.start:before`, `agent.CreateContainer:after`,
`ledger.acquire.mount:before`. `PYSHIM_FAILPOINTS` holds faults, separated by commas: `POINT[#N]=ACTION`, at the Nth
time the point is reached (the first, if not given). ACTION is one of

    error       the call fails
    delay(S)    it takes S seconds more
    hang        it never answers; a call of the agent is answered by its own deadline
    kill        the shim is gone, as by kill -9
    cancel      the task that makes the call is cancelled

`python -m tests.failpoints` prints every point.
"""

import asyncio
import inspect
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from hypervisors.base import Hypervisor
from pyshim.model import seams
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ledger import Ledger, ResourceKind
from pyshim.model.seams import Cgroups

VARIABLE = "PYSHIM_FAILPOINTS"


class Action(StrEnum):
    ERROR = "error"
    DELAY = "delay"
    HANG = "hang"
    KILL = "kill"
    CANCEL = "cancel"


class Fault(NamedTuple):
    point: str
    nth: int
    action: Action
    seconds: float


PROTOCOLS: Mapping[str, tuple[type, ...]] = {
    "host": (seams.Host,),
    "cgroups": (Cgroups,),
    "network": (seams.NetworkConnector, seams.Network),
    "virtiofsd": (seams.Virtiofsd,),
    "hypervisor": (Hypervisor,),
    "agent": (seams.AgentConnector,),
    "streams": (seams.ProcessStreams,),
    "stdin": (seams.InputStream,),
    "output": (seams.OutputStream,),
    "records": (seams.Records,),
    "ledger": (Ledger,),
    "publisher": (seams.Publisher,),
}
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "config": ("load",),
    "host": ("facts", "capacity"),
    "children": ("spawn", "output"),
    "records": ("open",),
}
AGENT_CALLS = (
    *("Check", "SetPolicy", "CreateSandbox", "DestroySandbox", "GetGuestDetails", "OnlineCPUMem", "GetOOMEvent"),
    *("GetVolumeStats", "ResizeVolume", "UpdateEphemeralMounts", "AddSwap", "GetMetrics", "GetIPTables", "SetIPTables"),
    *("UpdateInterface", "UpdateRoutes", "AddARPNeighbors", "ReseedRandomDev", "SetGuestDateTime"),
    *("CreateContainer", "StartContainer", "RemoveContainer", "UpdateContainer", "StatsContainer", "StatsContainers"),
    *("PauseContainer", "ResumeContainer", "ExecProcess", "SignalProcess", "WaitProcess", "TtyWinResize"),
    *("WriteStdin", "ReadStdout", "ReadStderr", "CloseStdin", "CopyFile", "RemoveStaleVirtiofsShareMounts"),
    "GetDiagnosticData",
)
"""The agent is faulted where its calls leave the shim, under their names on the wire."""
PASSED_ON = frozenset(
    {
        "host.undo",
        *("host.cgroups", "cgroups.roots"),
        *("hypervisor.capabilities", "hypervisor.console_tail", "hypervisor.saved"),
    }
)
"""Calls without points: the ledger makes the first itself, and the others only look at memory."""
NEVER_RAISE = frozenset(
    {"publisher.publish", "records.remove", "network.close_taps", "network.unwatch", "stdin.close_io"}
)
"""Calls that promise to succeed: no fault but a delay, or the end of the shim, can happen to them."""


class Step(NamedTuple):
    """A call through a seam. `is_async` is False where the caller waits for nothing: there nothing can hang."""

    name: str
    is_async: bool

    def actions(self) -> frozenset[Action]:
        allowed = set(Action)
        if not self.is_async:
            allowed -= {Action.HANG, Action.CANCEL}
        if self.name in NEVER_RAISE:
            allowed -= {Action.ERROR, Action.CANCEL}
        return frozenset(allowed)


@cache
def steps() -> Mapping[str, Step]:
    """Every step there is, by name."""
    return {step.name: step for step in _steps()}


def points() -> tuple[str, ...]:
    """Every point there is."""
    return tuple(f"{name}:{moment}" for name in sorted(steps()) for moment in ("before", "after"))


def _steps() -> Iterator[Step]:
    for seam, protocols in PROTOCOLS.items():
        for protocol in protocols:
            for call, function in _methods(protocol):
                name = f"{seam}.{call}"
                is_async = inspect.iscoroutinefunction(function)
                if seam == "ledger":
                    yield from (Step(f"{name}.{kind.value}", is_async) for kind in ResourceKind)
                elif name not in PASSED_ON:
                    yield Step(name, is_async)
    for seam, calls in FUNCTIONS.items():
        yield from (Step(f"{seam}.{call}", True) for call in calls)
    yield from (Step(f"agent.{call}", True) for call in AGENT_CALLS)


def _methods(protocol: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, member


_FAULT = re.compile(r"(?P<point>[\w.-]+:(before|after))(#(?P<nth>[1-9]\d*))?=(?P<action>\w+)(\((?P<seconds>[\d.]+)\))?")


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that `text` asks for. Raises InvalidArgument naming a part that does not parse."""
    known = steps()
    return tuple(_fault(part.strip(), known) for part in text.split(",") if part.strip())


def _fault(part: str, known: Mapping[str, Step]) -> Fault:
    match = _FAULT.fullmatch(part)
    if match is None:
        raise InvalidArgument(f"read failpoint {part!r}: expected POINT=ACTION, like hypervisor.start:before=error")
    step = known.get(match["point"].partition(":")[0])
    if step is None:
        raise InvalidArgument(f"read failpoint {part!r}: no such point (python -m tests.failpoints lists them)")
    if match["action"] not in step.actions():
        raise InvalidArgument(f"read failpoint {part!r}: actions there are {', '.join(sorted(step.actions()))}")
    if (match["action"] == Action.DELAY) != (match["seconds"] is not None):
        raise InvalidArgument(f"read failpoint {part!r}: a delay, and nothing else, has seconds: delay(1.5)")
    return Fault(match["point"], int(match["nth"] or 1), Action(match["action"]), float(match["seconds"] or 0))


def kill_self() -> None:
    """As `kill -9`: no handler, no undo, no last words."""
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoints:
    """The faults at the points. `hits` counts how often each was reached."""

    def __init__(self, faults: tuple[Fault, ...], *, kill: Callable[[], None] = kill_self) -> None:
        """`kill` ends this process; where it returns, nothing happens any more at the point."""
        self.hits: Counter[str] = Counter()
        self._faults = {(fault.point, fault.nth): fault for fault in faults}
        self._kill = kill

    async def reach(self, point: str) -> bool:
        """The fault at `point` has happened; True when the call must hang: never answer."""
        fault = self._due(point)
        if fault is None:
            return False
        match fault.action:
            case Action.DELAY:
                await asyncio.sleep(fault.seconds)
            case Action.CANCEL:
                task = asyncio.current_task()
                assert task is not None, "an awaited call has a task"
                task.cancel()
                await asyncio.sleep(0)
            case Action.HANG:
                return True
            case Action.KILL:
                self._kill()
                return True
            case Action.ERROR:
                raise injected(point)
        return False

    def reach_now(self, point: str) -> None:
        """As `reach`, for a call that waits for nothing."""
        fault = self._due(point)
        if fault is None:
            return
        match fault.action:
            case Action.DELAY:
                time.sleep(fault.seconds)
            case Action.KILL:
                self._kill()
            case _:
                raise injected(point)

    def _due(self, point: str) -> Fault | None:
        self.hits[point] += 1
        return self._faults.get((point, self.hits[point]))


def injected(point: str) -> FailedPrecondition:
    return FailedPrecondition(f"failpoint {point}: injected error")
