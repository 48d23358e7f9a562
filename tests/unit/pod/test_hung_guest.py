"""A guest that answers nothing any more does not keep its pod: a KILL ends what it was meant to end."""

import asyncio
from typing import Any

import pytest

from protos.agent import agent_pb2 as pb
from pyshim.model.errors import ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.task import Status, TaskExited
from pyshim.pod.killing import CHECK_S, EXIT_S, OWNER_EXIT_S, REPLY_S, GuestHangs
from pyshim.pod.process import KILLED_DRAIN_S
from tests.unit.pod.conftest import MEMBER, SANDBOX, Stack, until

C1, APP, OTHER = ContainerId("c1"), ContainerId("app"), ContainerId("other")
KILL, TERM = 9, 15


def hang(stack: Stack) -> None:
    """Calls from before the hang (the waits for its processes) stay unanswered as well."""
    stack.agent.hung |= {"SignalProcess", "Check", "RemoveContainer", "DestroySandbox", "StatsContainer"}


async def pod_of_two(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    for name in ("app", "other"):
        await stack.run(name, ["sleep"], annotations=MEMBER)


def exits(stack: Stack) -> list[tuple[str, int]]:
    return [(e.container_id, e.exit.status) for e in stack.publisher.events if isinstance(e, TaskExited)]


async def took(work: Any) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await work
    return loop.time() - started


async def test_a_kill_of_the_only_container_ends_it_and_the_vm_in_time(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    hang(stack)
    waiting = asyncio.ensure_future(stack.pod.wait(C1, None))

    assert await took(stack.pod.kill(C1, None, KILL, True)) <= OWNER_EXIT_S + 1

    assert (await waiting).status == 137
    assert exits(stack) == [("c1", 137)]
    await stack.delete_last(C1)
    assert stack.left() == {}


async def test_a_kill_that_the_guest_accepts_and_does_not_carry_out_ends_the_vm(stack: Stack) -> None:
    """The guest lies, or the process hangs in its kernel."""
    await stack.run("c1", ["sleep"])
    process = stack.agent.processes["c1", "c1"]

    async def lives_on(_status: int, **_: bool) -> None:
        pass

    process.end = lives_on  # type: ignore[method-assign]

    assert await took(stack.pod.kill(C1, None, KILL, False)) < 1
    assert stack.pod.state(C1, None).status is Status.RUNNING
    assert (await stack.pod.wait(C1, None)).status == 137
    assert process.signals == [KILL]
    await until(lambda: not stack.hypervisors[0].is_running)


async def test_a_kill_that_the_guest_carries_out_has_the_guests_status(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])

    await stack.pod.kill(C1, None, KILL, False)
    assert (await stack.pod.wait(C1, None)).status == 128 + KILL
    await asyncio.sleep(OWNER_EXIT_S + 1)

    assert exits(stack) == [("c1", 137)]
    await stack.pod.kill(C1, None, KILL, False)


async def test_a_kill_of_a_pods_container_ends_the_pod_when_the_agent_answers_nothing(stack: Stack) -> None:
    """Otherwise the kubelet, which kills the containers first, could not stop the pod."""

    await pod_of_two(stack)
    hang(stack)

    assert await took(stack.pod.kill(APP, None, KILL, False)) <= REPLY_S + CHECK_S + 1

    assert [(await stack.pod.wait(each, None)).status for each in (APP, OTHER, C1)] == [137, 255, 255]
    assert exits(stack)[0] == ("app", 137)
    assert sorted(exits(stack)) == [("app", 137), ("c1", 255), ("other", 255)]
    with pytest.raises(ShimError, match="guest hangs"):
        await stack.create("late", ["sleep"], annotations=MEMBER)
    for each in (APP, OTHER, C1):
        await stack.pod.delete(each, None)
    assert stack.left() == {}


async def test_a_kill_of_a_pods_container_in_a_guest_that_is_only_busy_ends_no_other(stack: Stack) -> None:
    stack.request_timeout_s = REPLY_S + CHECK_S
    await pod_of_two(stack)
    stack.agent.held["SignalProcess"] = asyncio.Event()
    killing = asyncio.ensure_future(stack.pod.kill(APP, None, KILL, False))
    await until(lambda: stack.agent.calls.count("Check") == 2)  # the first was at the start
    stack.agent.held["SignalProcess"].set()

    await killing

    assert (await stack.pod.wait(APP, None)).status == 137
    assert stack.pod.state(OTHER, None).status is Status.RUNNING


async def test_any_other_signal_to_a_guest_that_hangs_says_so_and_ends_nothing(stack: Stack) -> None:
    await pod_of_two(stack)
    hang(stack)

    with pytest.raises(GuestHangs, match="'app': the guest hangs"):
        await stack.pod.kill(APP, None, TERM, False)

    assert stack.pod.state(APP, None).status is Status.RUNNING
    assert stack.hypervisors[0].is_running


async def test_crio_goes_on_from_the_stop_signal_to_the_kill_when_the_guest_hangs(stack: Stack) -> None:
    """A stop ends when its first signal fails. Source: CRI-O 1.36.3, internal/oci/runtime_vm.go, StopContainer."""
    crio = {"io.kubernetes.cri-o.SandboxID": "c1", "io.kubernetes.cri-o.ContainerType": "container"}
    sandbox = {**crio, "io.kubernetes.cri-o.ContainerType": "sandbox"}
    await stack.run("c1", ["sleep"], annotations=sandbox)
    for name in ("app", "other"):
        await stack.run(name, ["sleep"], annotations=crio)
    hang(stack)

    await stack.pod.kill(APP, None, TERM, False)

    assert stack.pod.state(APP, None).status is Status.RUNNING
    await stack.pod.kill(APP, None, KILL, False)
    assert [(await stack.pod.wait(each, None)).status for each in (APP, OTHER, C1)] == [137, 255, 255]


async def test_a_kill_of_the_sandbox_needs_no_guest(stack: Stack) -> None:
    await pod_of_two(stack)
    hang(stack)

    assert await took(stack.pod.kill(C1, None, KILL, False)) < 1

    assert [(await stack.pod.wait(each, None)).status for each in (APP, OTHER, C1)] == [137, 137, 137]


def never_tells(stack: Stack) -> None:
    """The agent accepts signals and answers health checks, but reports no exit."""
    stack.agent.hung.add("WaitProcess")


def drips(stack: Stack) -> None:
    """Every read returns a byte, without end."""

    async def one_byte(_payload: bytes) -> Any:
        await asyncio.sleep(0.5)
        return pb.ReadStreamResponse(data=b"x")

    stack.agent._on_ReadStdout = one_byte  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [never_tells, drips])
async def test_a_kill_of_the_sandbox_ends_a_pod_whose_guest_lies(lie: Any, stack: Stack) -> None:
    lie(stack)
    await pod_of_two(stack)

    await stack.pod.kill(APP, None, KILL, False)
    await stack.pod.kill(C1, None, KILL, False)
    for each in (APP, OTHER, C1):
        await stack.pod.wait(each, None)
        await stack.pod.delete(each, None)
    assert stack.left() == {}


async def test_output_without_end_delays_the_exit_of_a_killed_container_for_a_limited_time(
    stack: Stack,
) -> None:
    """The guest has reported the exit, so the container has ended, even if output still comes."""

    drips(stack)
    await pod_of_two(stack)

    await stack.pod.kill(APP, None, KILL, False)
    assert await took(stack.pod.wait(APP, None)) <= KILLED_DRAIN_S + 1
    await asyncio.sleep(EXIT_S + 1)

    assert stack.pod.state(OTHER, None).status is Status.RUNNING
    assert stack.hypervisors[0].is_running


async def test_a_busy_container_is_reported_when_it_ends_and_ends_no_other(stack: Stack) -> None:
    """Its process is in state D of the guest's kernel; the agent answers other calls."""
    await pod_of_two(stack)
    process = stack.agent.processes["app", "app"]
    end = process.end

    async def much_later(status: int, **options: bool) -> None:
        asyncio.get_running_loop().call_later(10 * EXIT_S, lambda: ending.append(asyncio.ensure_future(end(status))))

    ending: list[asyncio.Future[None]] = []
    process.end = much_later  # type: ignore[method-assign]

    await stack.pod.kill(APP, None, KILL, False)
    assert await took(stack.pod.wait(APP, None)) >= 10 * EXIT_S

    assert exits(stack) == [("app", 128 + KILL)]
    assert stack.pod.state(OTHER, None).status is Status.RUNNING
    assert stack.hypervisors[0].is_running


async def test_a_busy_container_whose_agent_fails_a_health_check_takes_the_vm_with_it(stack: Stack) -> None:
    never_tells(stack)
    await pod_of_two(stack)
    await stack.pod.kill(APP, None, KILL, False)
    await asyncio.sleep(2 * EXIT_S + 1)
    assert stack.pod.state(APP, None).status is Status.RUNNING

    stack.agent.hung.add("Check")
    await stack.pod.wait(OTHER, None)

    assert sorted(exits(stack)) == [("app", 137), ("c1", 255), ("other", 255)]
    with pytest.raises(ShimError, match="has not ended 'app' 90 s after a KILL: check agent: "):
        await stack.create("late", ["sleep"], annotations=MEMBER)


async def test_an_exec_that_a_kill_does_not_end_is_reported_as_ended_and_ends_no_other(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    never_tells(stack)
    exec_id = await stack.exec(C1, "e1", ["sleep"])
    await stack.pod.start(C1, exec_id)

    await stack.pod.kill(C1, exec_id, KILL, False)

    assert await took(stack.pod.wait(C1, exec_id)) <= EXIT_S
    assert (await stack.pod.delete(C1, exec_id))[1].status == 137
    assert stack.pod.state(C1, None).status is Status.RUNNING
