"""Calls that cross each other, and what they find when they come back from an await."""

import asyncio

import pytest

from pyshim.model.errors import Cancelled, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.model.ids import ContainerId
from pyshim.model.ledger import ResourceKind
from pyshim.model.task import Status
from tests.unit.pod.conftest import MEMBER, PIPES, SANDBOX, Stack, outcomes, until

C1 = ContainerId("c1")
APP = ContainerId("app")


async def boot(stack: Stack) -> asyncio.Task[int]:
    """A Create of `c1` that has got as far as a VM whose agent does not answer."""
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.pod.create(stack.request("c1", ["sleep"])))
    await until(lambda: "Check" in stack.agent.calls)
    return creating


async def run_pod(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)


async def test_a_creation_that_is_deleted_before_its_first_step_leaves_nothing(stack: Stack) -> None:
    create = stack.pod.create(stack.request("c1", ["sleep"]))

    assert await outcomes(create, stack.pod.delete(C1, None)) == [Cancelled, NotFound]
    assert stack.hypervisors == []
    assert stack.left() == {}


async def test_a_second_delete_does_not_cancel_the_undo_of_the_first(stack: Stack) -> None:
    creating = await boot(stack)
    stack.hypervisors[0].may_stop.clear()

    deletes = [asyncio.ensure_future(stack.pod.delete(C1, None)) for _ in range(2)]
    await asyncio.sleep(0.01)
    deletes.append(asyncio.ensure_future(stack.pod.delete(C1, None)))
    await asyncio.sleep(0.01)
    stack.hypervisors[0].may_stop.set()

    results = await asyncio.gather(creating, *deletes, return_exceptions=True)
    assert [type(result) for result in results] == [Cancelled, NotFound, NotFound, NotFound]
    assert stack.left() == {}


async def test_delete_is_answered_while_the_kernel_takes_the_shim_out_of_its_cgroups(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    stack.host.cgroup_tree.may_leave.clear()

    await stack.pod.kill(container, None, 9, True)
    await stack.pod.wait(container, None)
    await stack.pod.delete(container, None)

    assert stack.left().keys() == {"cgroups", "ledger", "state"}
    assert {entry.kind for entry in stack.records[-1].ledger.entries} == {ResourceKind.CGROUP}
    with pytest.raises(FailedPrecondition, match="already runs 'c1'"):
        await stack.create("c2", ["sleep"])
    ending = asyncio.ensure_future(stack.pod.shutdown(False))
    await asyncio.sleep(1)
    assert not ending.done(), "the shim ends only after it has left"
    stack.host.cgroup_tree.may_leave.set()
    assert await ending
    assert stack.left() == {}


async def test_delete_is_answered_while_an_answer_of_the_monitor_is_still_under_way(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    (monitor,) = stack.host.monitors
    monitor.may_close.clear()

    await stack.pod.kill(container, None, 9, True)
    await stack.pod.wait(container, None)
    await stack.pod.delete(container, None)

    held = {entry.kind for entry in stack.records[-1].ledger.entries}
    assert held == {ResourceKind.SOCKET, ResourceKind.CGROUP}, "what a crash would leave is on record"
    monitor.may_close.set()
    assert await stack.pod.shutdown(False)
    assert stack.left() == {}


async def test_the_end_of_the_shim_while_a_vm_boots_leaves_nothing(stack: Stack) -> None:
    creating = await boot(stack)

    await stack.pod.close()

    with pytest.raises(Cancelled, match="create container 'c1'"):
        await creating
    assert stack.left() == {}


async def test_nothing_is_created_once_the_shim_ends(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    stack.hypervisors[0].may_stop.clear()
    closing = asyncio.ensure_future(stack.pod.close())
    await asyncio.sleep(0.01)

    with pytest.raises(Unavailable, match="create container 'late'"):
        await stack.create("late", ["sleep"])

    stack.hypervisors[0].may_stop.set()
    await closing
    assert stack.left() == {}


async def test_of_two_sandboxes_at_once_the_second_is_refused(stack: Stack) -> None:
    results = await asyncio.gather(stack.create("c1", ["sleep"]), stack.create("c2", ["sleep"]), return_exceptions=True)

    assert [type(result) for result in results] == [str, FailedPrecondition]
    assert len(stack.hypervisors) == 1
    await stack.delete_last(C1)
    assert stack.left() == {}


async def test_after_a_failed_create_the_same_sandbox_can_be_created(stack: Stack) -> None:
    stack.agent.failures["CreateContainer"] = (13, "not today")
    with pytest.raises(ShimError, match="not today"):
        await stack.create("c1", ["sleep"])
    stack.agent.failures.clear()

    await stack.create("c1", ["sleep"])

    assert stack.pod.state(C1, None).status is Status.CREATED


async def test_shutdown_after_one_delete_leaves_the_creation_of_another_alone(stack: Stack) -> None:
    await run_pod(stack)
    stack.agent.held["CreateContainer"] = asyncio.Event()
    creating = asyncio.ensure_future(stack.create("app", ["sleep"], annotations=MEMBER))
    await until(lambda: "CreateContainer" in stack.agent.calls)

    assert not await stack.pod.shutdown(now=False)

    stack.agent.held["CreateContainer"].set()
    assert await creating == APP


async def test_a_creation_under_way_when_its_sandbox_is_deleted_fails_and_leaves_nothing(stack: Stack) -> None:
    await run_pod(stack)
    stack.agent.hung.add("CreateContainer")
    creating = asyncio.ensure_future(stack.create("app", ["sleep"], annotations=MEMBER))
    await until(lambda: "CreateContainer" in stack.agent.calls)

    await stack.end(C1)
    await stack.pod.delete(C1, None)

    with pytest.raises(Unavailable, match="create container 'app'"):
        await creating
    await until(lambda: stack.pod.is_empty)
    assert stack.left() == {}


async def test_a_container_is_refused_until_its_sandbox_runs(stack: Stack) -> None:
    stack.agent.held["CreateSandbox"] = asyncio.Event()
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"], annotations=SANDBOX))
    await until(lambda: "CreateSandbox" in stack.agent.calls)

    with pytest.raises(Unavailable, match=r"^create container 'app': sandbox 'c1' is opening$"):
        await stack.create("app", ["sleep"], annotations=MEMBER)

    stack.agent.held["CreateSandbox"].set()
    await creating
    await stack.create("app", ["sleep"], annotations=MEMBER)


async def test_a_cancelled_creation_is_undone_in_the_guest_too(stack: Stack) -> None:
    await run_pod(stack)
    stack.agent.late["CreateContainer"] = asyncio.Event()
    creating = asyncio.ensure_future(stack.create("app", ["sleep"], annotations=MEMBER))
    await until(lambda: "app" in stack.agent.containers)

    with pytest.raises(NotFound):
        await stack.pod.delete(APP, None)

    with pytest.raises(Cancelled):
        await creating
    assert "app" not in stack.agent.containers


async def test_a_failing_undo_does_not_hide_the_first_error_and_is_tried_again(stack: Stack) -> None:
    stack.host.faults.plan({"create_vm": 1, "release": 1})

    with pytest.raises(FailedPrecondition, match="create_vm"):
        await stack.create("c1", ["sleep"])

    assert stack.host.faults.seen["release"] > 1
    assert stack.left() == {}


async def test_a_delete_whose_undo_failed_can_be_repeated(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "2"])
    await stack.pod.wait(container, None)
    await until(lambda: not stack.hypervisors[0].is_running)
    await asyncio.sleep(1)
    stack.host.faults.plan({"release": stack.host.faults.seen["release"] + 1})

    with pytest.raises(FailedPrecondition, match="release"):
        await stack.pod.delete(container, None)

    assert (await stack.pod.delete(container, None))[1].status == 2
    assert stack.publisher.names().count("TaskDeleted") == 1
    assert stack.left() == {}


async def test_nothing_is_started_or_published_after_the_inits_exit(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"], PIPES)
    stack.agent.late["ExecProcess"] = asyncio.Event()
    starting = asyncio.ensure_future(stack.pod.start(container, exec_id))
    await until(lambda: ("c1", "e1") in stack.agent.processes)

    await stack.agent.processes["c1", "c1"].end(0)
    await stack.pod.wait(container, None)
    stack.agent.late["ExecProcess"].set()

    with pytest.raises(ShimError):
        await starting
    assert stack.publisher.names()[-1] == "TaskExited"
    assert stack.publisher.events[-1].process_id == "c1"
    assert (await stack.pod.wait(container, exec_id)).status != 0
    assert stack.host.streams["e1"].closed


async def test_a_wait_for_an_exec_never_started_returns_when_its_container_is_deleted(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"])
    waiting = asyncio.ensure_future(stack.pod.wait(container, exec_id))
    await stack.end(container)

    await stack.pod.delete(container, None)

    assert (await waiting).status == 137
    assert [type(event).__name__ for event in stack.publisher.events].count("TaskExited") == 1


async def test_an_exec_whose_streams_open_after_the_end_is_refused_and_closed(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"], PIPES)
    stack.host.may_open_streams.clear()
    starting = asyncio.ensure_future(stack.pod.start(container, exec_id))
    await asyncio.sleep(0)
    await stack.end(container)
    await stack.pod.delete(container, None)

    stack.host.may_open_streams.set()

    with pytest.raises(FailedPrecondition, match="start exec 'e1'"):
        await starting
    assert stack.host.streams["e1"].closed
    assert "ExecStarted" not in stack.publisher.names()


async def test_deleting_an_exec_and_its_container_at_once_is_no_error(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    for name in ("e1", "e2"):
        await stack.pod.start(container, await stack.exec(container, name, ["exit", "0"], PIPES))
        await stack.pod.wait(container, name)
    await stack.end(container)

    results = await asyncio.gather(
        stack.pod.delete(container, None), stack.pod.delete(container, "e2"), stack.pod.delete(container, "e1")
    )

    assert [exit_status.status for _, exit_status in results] == [137, 0, 0]


async def test_a_pause_that_fails_by_the_inits_exit_is_no_event(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    stack.agent.late["PauseContainer"] = asyncio.Event()
    pausing = asyncio.ensure_future(stack.pod.pause(container))
    await until(lambda: "PauseContainer" in stack.agent.calls)

    stack.hypervisors[0].die("killed")

    with pytest.raises(ShimError):
        await pausing
    assert (await stack.pod.wait(container, None)).status == 255
    assert "TaskPaused" not in stack.publisher.names()


async def test_a_start_that_fails_by_the_loss_of_the_guest_is_no_event(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])
    stack.agent.hung.add("StartContainer")
    starting = asyncio.ensure_future(stack.pod.start(container, None))
    await until(lambda: "StartContainer" in stack.agent.calls)

    stack.hypervisors[0].die("killed")

    with pytest.raises(ShimError):
        await starting
    assert (await stack.pod.wait(container, None)).status == 255
    assert stack.publisher.names() == ["TaskCreated", "TaskExited"]


async def test_a_signal_between_the_guests_exit_and_ours_is_answered_as_after_the_exit(
    stack: Stack,
) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    await stack.pod.start(container, await stack.exec(container, "e1", ["sleep"]))  # the init's exit follows the exec's
    await stack.agent.processes["c1", "c1"].end(0)
    await until(lambda: ("c1", "c1") in stack.agent.ended)
    await asyncio.sleep(0.01)
    stack.agent.failures["SignalProcess"] = (13, "Invalid exec id")
    assert stack.pod.state(container, None).status is Status.RUNNING

    await stack.pod.kill(container, None, 9, False)
    with pytest.raises(NotFound, match="already exited"):
        await stack.pod.kill(container, None, 1, False)


async def test_a_status_that_the_guest_reported_stays_after_its_loss(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    await stack.pod.start(container, await stack.exec(container, "e1", ["sleep"]))  # the init's exit follows the exec's
    await stack.agent.processes["c1", "c1"].end(0)
    await until(lambda: ("c1", "c1") in stack.agent.ended)
    await asyncio.sleep(0.01)

    stack.hypervisors[0].die("powered off")

    assert (await stack.pod.wait(container, None)).status == 0


async def test_a_hung_guest_does_not_delay_delete_beyond_the_kubelets_ten_seconds(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"], PIPES)
    stack.agent.hung |= {"SignalProcess", "RemoveContainer", "DestroySandbox"}
    loop = asyncio.get_running_loop()
    began = loop.time()

    _, exit_status = await stack.pod.delete(container, None)

    assert exit_status.status == 137
    assert loop.time() - began < 10
    await until(lambda: stack.pod.is_empty)
    assert stack.left() == {}


async def test_a_stalled_reader_does_not_delay_delete_beyond_the_kubelets_ten_seconds(stack: Stack) -> None:
    container = await stack.create("c1", ["flood", "3000000"], PIPES)
    stack.host.streams["c1"].stdout.gate.clear()
    await stack.pod.start(container, None)
    await stack.pod.wait(container, None)
    stack.agent.hung |= {"RemoveContainer", "DestroySandbox"}
    loop = asyncio.get_running_loop()
    began = loop.time()

    await stack.pod.delete(container, None)

    assert loop.time() - began < 10


async def test_the_end_of_the_shim_does_not_wait_for_a_hung_guest_container_by_container(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], PIPES)
    stack.agent.hung |= {"SignalProcess", "RemoveContainer", "DestroySandbox"}
    loop = asyncio.get_running_loop()
    began = loop.time()

    await stack.pod.close()

    assert loop.time() - began < 5
    assert stack.publisher.names() == ["TaskCreated", "TaskStarted", "TaskExited"]
    assert stack.left() == {}


async def test_the_shim_ends_even_if_the_end_of_a_container_fails(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], PIPES)
    streams = stack.host.streams["c1"]
    close = streams.close

    async def fails_once() -> None:
        streams.close = close  # type: ignore[method-assign]
        raise OSError("unforeseen")

    streams.close = fails_once  # type: ignore[method-assign]

    assert await stack.pod.shutdown(now=True)


async def test_oom_events_reach_containerd_at_a_limited_rate(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    for _ in range(1000):
        stack.agent.oom.put_nowait("c1")

    await asyncio.sleep(1.05)

    assert 5 <= stack.publisher.names().count("TaskOom") <= 11


async def test_an_agent_that_is_reached_at_the_moment_its_create_is_cancelled_is_closed(stack: Stack) -> None:
    request = stack.request("c1", ["sleep"])
    stack.on_connected = lambda: stack.pod._creating[request.container_id].task.cancel()

    with pytest.raises(ShimError):
        await stack.pod.create(request)

    assert [client.is_closed for client in stack.clients] == [True]


async def test_a_container_under_creation_looks_the_same_to_state_pids_connect_and_wait(stack: Stack) -> None:
    stack.host.may_open_streams.clear()  # as while nerdctl's log program starts, which asks State and then Wait
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"], PIPES))
    await until(lambda: "CreateSandbox" in stack.agent.calls)
    waiting = asyncio.ensure_future(stack.pod.wait(C1, None))
    vm_pid = stack.hypervisors[0].pid

    assert stack.pod.state(C1, None).status is Status.CREATED
    assert stack.pod.state(C1, None).pid == stack.pod.connect(C1) == vm_pid > 0
    assert [(process.pid, process.exec_id) for process in stack.pod.pids(C1)] == [(vm_pid, None)]
    await asyncio.sleep(1)
    assert not waiting.done()

    stack.host.may_open_streams.set()
    await creating
    await stack.pod.start(C1, None)
    assert not waiting.done(), "after the creation it waits for the exit"
    await stack.pod.kill(C1, None, 9, True)
    assert (await waiting).status == 137
    await stack.delete_last(C1)


async def test_a_wait_for_a_container_whose_creation_fails_ends_with_not_found(stack: Stack) -> None:
    creating = await boot(stack)
    waits = [asyncio.ensure_future(stack.pod.wait(C1, None)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()

    stack.hypervisors[0].die("qemu exited with status 1")

    results = await asyncio.gather(creating, *waits, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, asyncio.CancelledError, NotFound]
