"""Random sequences of calls and mishaps on a pod, against rules that hold whatever happened before.

Peers and clock are the test's own, so a sequence that fails, fails again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyshim.model.errors import ShimError
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import ExitStatus, Status
from tests.fakes.clock import FastForwardLoop
from tests.unit.pod.conftest import MEMBER, NO_STDIO, PIPES, SANDBOX, Stack

CONTAINERS = st.sampled_from(["c1", "a", "b"])
EXECS = st.sampled_from(["e1", "e2"])
PROGRAMS = st.sampled_from([["sleep"], ["exit", "3"], ["cat"], ["flood", "400000"], ["hold", "x"]])
HOLDABLE = st.sampled_from(
    ["CreateContainer", "StartContainer", "ExecProcess", "SignalProcess", "PauseContainer", "RemoveContainer"]
)


class PodMachine(RuleBasedStateMachine):
    """Calls run at the same time; `settle` runs the loop for some seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = FastForwardLoop()
        self.calls: list[asyncio.Task[Any]] = []
        self.exits: dict[tuple[str, str | None, int], ExitStatus] = {}
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop, debug=False)
        self.stack = self.runner.run(self._stack())

    async def _stack(self) -> Stack:
        return Stack()

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            with contextlib.suppress(ShimError):
                await call

        async def start() -> None:
            self.calls.append(asyncio.get_running_loop().create_task(run()))
            await asyncio.sleep(0)

        self.runner.run(start())

    def act(self, action: Callable[[], object]) -> None:
        async def run() -> None:
            action()
            await asyncio.sleep(0)

        self.runner.run(run())

    # ---- what clients do

    @initialize(running=st.sampled_from([(), ("c1",), ("c1", "a")]))
    def begin_with(self, running: tuple[str, ...]) -> None:
        for name in running:
            self.create(name, ["sleep"], PIPES)
            self.time_passes(0.01)
            self.start(name)
            self.time_passes(0.01)

    @rule(name=CONTAINERS, program=PROGRAMS, stdio=st.sampled_from([NO_STDIO, PIPES]))
    def create(self, name: str, program: list[str], stdio: Any) -> None:
        annotations = SANDBOX if name == "c1" else MEMBER
        self.begin(self.stack.pod.create(self.stack.request(name, program, stdio, annotations=annotations)))

    @rule(name=CONTAINERS)
    def start(self, name: str) -> None:
        self.begin(self.stack.pod.start(ContainerId(name), None))

    @rule(name=CONTAINERS, exec_id=EXECS, program=PROGRAMS)
    def exec(self, name: str, exec_id: str, program: list[str]) -> None:
        self.begin(self.stack.exec(ContainerId(name), exec_id, program, PIPES))

    @rule(name=CONTAINERS, exec_id=EXECS)
    def start_exec(self, name: str, exec_id: str) -> None:
        self.begin(self.stack.pod.start(ContainerId(name), ExecId(exec_id)))

    @rule(name=CONTAINERS, exec_id=st.none() | EXECS, everyone=st.booleans())
    def kill(self, name: str, exec_id: str | None, everyone: bool) -> None:
        self.begin(self.stack.pod.kill(ContainerId(name), exec_id and ExecId(exec_id), 9, everyone))

    @rule(name=CONTAINERS, exec_id=st.none() | EXECS)
    def delete(self, name: str, exec_id: str | None) -> None:
        self.begin(self.stack.pod.delete(ContainerId(name), exec_id and ExecId(exec_id)))

    @rule(name=CONTAINERS, exec_id=st.none() | EXECS)
    def wait(self, name: str, exec_id: str | None) -> None:
        self.begin(self.stack.pod.wait(ContainerId(name), exec_id and ExecId(exec_id)))

    @rule(name=CONTAINERS)
    def pause(self, name: str) -> None:
        self.begin(self.stack.pod.pause(ContainerId(name)))

    @rule(name=CONTAINERS)
    def resume(self, name: str) -> None:
        self.begin(self.stack.pod.resume(ContainerId(name)))

    @rule(name=CONTAINERS)
    def close_io(self, name: str) -> None:
        self.begin(self.stack.pod.close_io(ContainerId(name), None))

    @rule()
    def shutdown(self) -> None:
        self.begin(self.stack.pod.shutdown(now=False))

    # ---- events in the guest

    @rule(reason=st.sampled_from(["killed", "panicked"]))
    def the_vm_dies(self, reason: str) -> None:
        for vm in self.stack.hypervisors[-1:]:
            self.act(lambda vm=vm: vm.die(reason))

    @rule()
    def the_connection_drops(self) -> None:
        for client in self.stack.clients[-1:]:
            self.act(client.close)

    @rule(method=HOLDABLE, late=st.booleans())
    def the_agent_gets_slow(self, method: str, late: bool) -> None:
        held = self.stack.agent.late if late else self.stack.agent.held
        held.setdefault(method, asyncio.Event())

    @rule()
    def the_agent_recovers(self) -> None:
        for held in (self.stack.agent.late, self.stack.agent.held):
            for event in held.values():
                self.act(event.set)
            held.clear()

    @rule(seconds=st.sampled_from([0.01, 1.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        async def settle() -> None:
            await asyncio.sleep(seconds)

        self.runner.run(settle())

    # ---- invariants

    @invariant()
    def exits_are_latched(self) -> None:
        containers = self.stack.pod._containers
        for container in containers.values():
            for process in (container.init, *container._execs.values()):
                key = (container.id, process.exec_id, id(process))
                if process.exit is not None:
                    assert self.exits.setdefault(key, process.exit) == process.exit
                assert (process.exit is not None) == (process.status is Status.STOPPED)

    @invariant()
    def events_come_in_order(self) -> None:
        lives: dict[str, list[Any]] = {}
        for event in self.stack.publisher.events:
            if type(event).__name__ == "TaskCreated":
                lives[event.container_id] = []  # the id is used again
            lives[event.container_id].append(event)
            check_order(lives[event.container_id])

    def teardown(self) -> None:
        async def end() -> None:
            for held in (self.stack.agent.late, self.stack.agent.held):
                for event in held.values():
                    event.set()
            async with asyncio.timeout(120):
                await self.stack.pod.close()
                await asyncio.gather(*self.calls)  # every call was answered, Wait included
            left = self.stack.left()
            await self.stack.close()
            assert left == {}
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [task.get_name() for task in others if not task.get_name().startswith(("fake", "ttrpc"))]

        self.runner.run(end())
        self.runner.close()


def check_order(events: list[Any]) -> None:
    """The rules of containerd for the events of one container, so far; only the last is new."""
    *before, last = [(type(event).__name__, getattr(event, "exec_id", None), event) for event in events]
    name, exec_id, event = last
    earlier = Counter(earlier_name for earlier_name, _, _ in before)
    init_ended = any(n == "TaskExited" and e.process_id == e.container_id for n, _, e in before)
    match name:
        case "TaskStarted":
            assert not earlier["TaskStarted"]
            assert not init_ended
        case "TaskExited" if event.process_id == event.container_id:
            assert not init_ended
            assert running_execs(events[:-1]) == Counter()
        case "TaskExited":
            assert running_execs(events[:-1])[event.process_id] == 1
        case "TaskDeleted":
            assert init_ended
            assert not earlier["TaskDeleted"]
        case "ExecStarted":
            assert not init_ended
            assert any(n == "ExecAdded" and e == exec_id for n, e, _ in before)
        case "ExecAdded" | "TaskPaused" | "TaskResumed":
            assert earlier["TaskStarted"]
            assert not init_ended


def running_execs(events: list[Any]) -> Counter[str]:
    running: Counter[str] = Counter()
    for event in events:
        match type(event).__name__:
            case "ExecStarted":
                running[event.exec_id] += 1
            case "TaskExited" if event.process_id != event.container_id:
                running[event.process_id] -= 1
    return +running


PodMachine.TestCase.settings = settings(stateful_step_count=30, derandomize=True)
TestPod = PodMachine.TestCase
