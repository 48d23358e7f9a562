"""One pod's life through the calls of the Task API, on fakes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pyshim.model.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
)
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import Status
from pyshim.pod.container import EXIT_START_FAILED
from tests.unit.pod.conftest import MEMBER, PIPES, SANDBOX, Stack, until


async def test_a_container_runs_to_its_exit_and_leaves_nothing(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "3"])

    exit_status = await stack.pod.wait(container, None)
    pid, deleted = await stack.pod.delete(container, None)

    assert exit_status.status == deleted.status == 3
    assert pid == stack.hypervisors[0].pid
    assert stack.publisher.names() == ["TaskCreated", "TaskStarted", "TaskExited", "TaskDeleted"]
    assert await stack.pod.shutdown(now=False)
    assert stack.left() == {}


async def test_output_is_complete_before_the_exit_is_seen(stack: Stack) -> None:
    container = await stack.run("c1", ["flood", "3000000"], PIPES)

    await stack.pod.wait(container, None)

    assert len(stack.host.streams["c1"].stdout.data) == 3_000_000
    assert stack.host.streams["c1"].stdout.closed


async def test_a_slow_reader_delays_the_exit_but_loses_nothing(stack: Stack) -> None:
    request = stack.request("c1", ["flood", "900000"], PIPES)
    await stack.pod.create(request)
    output = stack.host.streams["c1"].stdout
    output.gate.clear()
    await stack.pod.start(ContainerId("c1"), None)
    waiting = asyncio.ensure_future(stack.pod.wait(ContainerId("c1"), None))
    await asyncio.sleep(0.05)

    assert not waiting.done()
    output.gate.set()
    await waiting

    assert len(output.data) == 900_000


async def test_stdin_reaches_the_process_whole_before_its_end(stack: Stack) -> None:
    container = await stack.run("c1", ["cat"], PIPES)
    streams = stack.host.streams["c1"]

    streams.stdin.chunks.put_nowait(b"a" * 2_500_000)
    streams.stdin.chunks.put_nowait(b"tail")
    await stack.pod.close_io(container, None)
    await stack.pod.wait(container, None)

    assert bytes(streams.stdout.data) == b"a" * 2_500_000 + b"tail"


async def test_wait_before_start_and_after_exit_give_the_same_answer(stack: Stack) -> None:
    container = await stack.create("c1", ["exit", "7"])
    early = asyncio.ensure_future(stack.pod.wait(container, None))
    await asyncio.sleep(0)

    await stack.pod.start(container, None)
    first = await early
    late = await stack.pod.wait(container, None)

    assert first == late
    assert late.status == 7


async def test_after_the_exit_a_kill_or_term_succeeds_and_other_signals_are_not_found(stack: Stack) -> None:
    """CRI-O stops containers that have ended; containerd accepts both answers."""
    container = await stack.run("c1", ["exit", "0"])
    await stack.pod.wait(container, None)

    for signal in (9, 15):
        await stack.pod.kill(container, None, signal, False)
    for signal in (0, 1, 2):
        with pytest.raises(NotFound, match="already exited"):
            await stack.pod.kill(container, None, signal, False)


async def test_signal_zero_is_answered_without_the_guest(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])

    await stack.pod.kill(container, None, 0, False)
    await stack.pod.start(container, None)
    await stack.pod.kill(container, None, 0, False)

    assert "SignalProcess" not in stack.agent.calls


async def test_sigkill_on_a_created_task_stops_it_and_wakes_wait(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])
    waiting = asyncio.ensure_future(stack.pod.wait(container, None))

    await stack.pod.kill(container, None, 9, False)

    assert (await waiting).status == 137
    assert stack.pod.state(container, None).status is Status.STOPPED


async def test_the_init_exit_is_published_after_every_exec_exit(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    for name in ("e1", "e2"):
        await stack.pod.start(container, await stack.exec(container, name, ["sleep"]))
    init = stack.agent.processes["c1", "c1"]
    await init.end(0)
    await asyncio.sleep(0.02)
    assert "TaskExited" not in stack.publisher.names()

    for name in ("e1", "e2"):
        await stack.agent.processes["c1", name].end(137)
    await stack.pod.wait(container, None)

    exits = [event.process_id for event in stack.publisher.events if type(event).__name__ == "TaskExited"]
    assert sorted(exits[:2]) == ["e1", "e2"]
    assert exits[2:] == ["c1"]


async def test_a_start_that_fails_latches_the_exit_so_that_wait_returns(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"], PIPES)
    waiting = asyncio.ensure_future(stack.pod.wait(container, exec_id))
    stack.agent.failures["ExecProcess"] = (3, "no such program")

    with pytest.raises(InvalidArgument, match="no such program"):
        await stack.pod.start(container, exec_id)

    assert (await waiting).status == 128
    assert stack.host.streams["e1"].closed  # ctr waits for the end of the stream before it reports the error
    await stack.pod.delete(container, exec_id)
    with pytest.raises(NotFound):
        stack.pod.state(container, exec_id)


async def test_exec_ids_are_unique_while_used_and_free_after_delete(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["exit", "4"])
    with pytest.raises(AlreadyExists):
        await stack.exec(container, "e1", ["exit", "4"])

    await stack.pod.start(container, exec_id)
    assert (await stack.pod.wait(container, exec_id)).status == 4
    await stack.pod.delete(container, exec_id)
    again = await stack.exec(container, "e1", ["exit", "5"])
    await stack.pod.start(container, again)

    assert (await stack.pod.wait(container, again)).status == 5


async def test_a_paused_container_is_paused_for_its_execs_too(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"])
    await stack.pod.start(container, exec_id)

    await stack.pod.pause(container)

    assert stack.pod.state(container, None).status is Status.PAUSED
    assert stack.pod.state(container, exec_id).status is Status.PAUSED
    with pytest.raises(FailedPrecondition):
        await stack.exec(container, "e2", ["sleep"])
    with pytest.raises(FailedPrecondition):
        await stack.pod.pause(container)
    await stack.pod.resume(container)
    assert stack.pod.state(container, None).status is Status.RUNNING


async def test_a_failed_pause_leaves_the_container_running(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    stack.agent.failures["PauseContainer"] = (13, "freezer says no")

    with pytest.raises(ShimError, match="freezer says no"):
        await stack.pod.pause(container)

    assert stack.pod.state(container, None).status is Status.RUNNING


async def test_a_pause_that_the_guest_answers_too_late_is_undone(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    stack.agent.late["PauseContainer"] = asyncio.Event()
    stack.agent.hung.add("ResumeContainer")

    with pytest.raises(DeadlineExceeded):
        await stack.pod.pause(container)

    assert stack.pod.state(container, None).status is Status.PAUSING
    await until(lambda: stack.agent.calls.count("ResumeContainer") == 2, every_s=0.1)
    stack.agent.hung.clear()
    await until(lambda: stack.pod.state(container, None).status is Status.RUNNING, every_s=1)
    assert not {"TaskPaused", "TaskResumed"} & set(stack.publisher.names())
    await stack.pod.kill(container, None, 9, False)


async def test_an_exec_that_the_guest_starts_too_late_is_ended_there(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"])
    stack.agent.late["ExecProcess"] = asyncio.Event()
    stack.agent.failures["SignalProcess"] = (13, "Invalid exec id")

    with pytest.raises(DeadlineExceeded):
        await stack.pod.start(container, exec_id)

    assert (await stack.pod.wait(container, exec_id)).status == EXIT_START_FAILED
    await asyncio.sleep(2)
    del stack.agent.failures["SignalProcess"]
    process = stack.agent.processes["c1", "e1"]
    await until(lambda: ("c1", "e1") in stack.agent.ended, every_s=0.1)
    assert process.signals == [9]
    assert stack.pod.state(container, None).status is Status.RUNNING


@pytest.mark.parametrize(
    ("program", "agents", "runcs"),
    [
        ("nosuch", "executable file `nosuch` not found in $PATH", 'exec: "nosuch": executable file not found in $PATH'),
        ("nosuch", "the file nosuch was not found", 'exec: "nosuch": executable file not found in $PATH'),
        ("/nosuch", "the file /nosuch was not found", 'exec: "/nosuch": stat /nosuch: no such file or directory'),
    ],
)
async def test_a_missing_program_is_named_as_runcs_shim_does(
    program: str, agents: str, runcs: str, stack: Stack
) -> None:
    stack.agent.failures["CreateContainer"] = stack.agent.failures["ExecProcess"] = (13, agents)

    with pytest.raises(FailedPrecondition) as caught:
        await stack.create("c1", [program])

    assert str(caught.value).startswith(f"create container 'c1': {runcs}: the file {program} was not found; ")
    del stack.agent.failures["CreateContainer"]
    container = await stack.run("c1", ["sleep"])
    with pytest.raises(FailedPrecondition) as caught:
        await stack.pod.start(container, await stack.exec(container, "e1", [program]))
    assert str(caught.value).startswith(f"run exec 'e1' in container 'c1': {runcs}: the file {program} was not found; ")


async def test_a_file_that_cannot_be_executed_is_named_as_runcs_shim_does(stack: Stack) -> None:
    """Docker's client makes exit status 126 of these words, in this case of letters."""
    stack.agent.failures["CreateContainer"] = (13, "create container 'c1': open executable: Permission denied")

    with pytest.raises(FailedPrecondition, match=r"^create container 'c1': exec: \"/etc/passwd\": permission denied; "):
        await stack.create("c1", ["/etc/passwd"])


async def test_another_error_is_not_taken_for_a_missing_program(stack: Stack) -> None:
    stack.agent.failures["CreateContainer"] = (13, "mount: the file /data was not found")

    with pytest.raises(ShimError, match=r"^create container 'c1' in guest: mount"):
        await stack.create("c1", ["sleep"])


async def test_delete_of_a_running_container_is_refused(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])

    with pytest.raises(FailedPrecondition, match="it is running"):
        await stack.pod.delete(container, None)


async def test_delete_twice_is_not_found_and_delete_at_once_is_shared(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "1"])
    await stack.pod.wait(container, None)

    one, two = await asyncio.gather(stack.pod.delete(container, None), stack.pod.delete(container, None))

    assert one == two
    with pytest.raises(NotFound):
        await stack.pod.delete(container, None)


async def test_a_created_container_can_be_deleted(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])

    _, exit_status = await stack.pod.delete(container, None)

    assert exit_status.status == 137


async def test_create_repeated_while_under_way_is_one_creation(stack: Stack) -> None:
    request = stack.request("c1", ["sleep"])

    pids = await asyncio.gather(stack.pod.create(request), stack.pod.create(request))

    assert pids[0] == pids[1]
    assert stack.agent.calls.count("CreateContainer") == 1
    with pytest.raises(AlreadyExists):
        await stack.pod.create(request)


async def test_state_answers_while_the_vm_boots_and_delete_abandons_it(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.pod.create(stack.request("c1", ["sleep"])))
    await until(lambda: "Check" in stack.agent.calls)

    state = stack.pod.state(ContainerId("c1"), None)

    assert state.status is Status.CREATED
    with pytest.raises(NotFound):
        await stack.pod.delete(ContainerId("c1"), None)
    with pytest.raises(Cancelled, match="create container 'c1'"):
        await creating
    assert stack.left() == {}


@pytest.mark.parametrize("cause", ["vm", "virtiofsd", "agent"])
async def test_a_lost_guest_ends_every_task_with_255_and_the_reason(cause: str, stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    exec_id = await stack.exec(container, "e1", ["sleep"])
    await stack.pod.start(container, exec_id)

    match cause:
        case "vm":
            stack.hypervisors[0].die("qemu was killed by SIGKILL")
        case "virtiofsd":
            next(iter(stack.host.daemons)).ended.set_result("virtiofsd was killed")
        case "agent":
            stack.clients[0].close()

    assert (await stack.pod.wait(container, exec_id)).status == 255
    assert (await stack.pod.wait(container, None)).status == 255
    assert stack.publisher.names()[-2:] == ["TaskExited", "TaskExited"]
    await until(lambda: not stack.hypervisors[0].is_running)
    await stack.pod.kill(container, None, 9, False)
    await until(lambda: stack.host.streams["c1"].stdout.closed)
    assert (await stack.pod.delete(container, None))[1].status == 255
    assert stack.left() == {}


async def test_the_vm_goes_when_the_single_container_has_exited(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "0"])
    await stack.pod.wait(container, None)

    await until(lambda: not stack.hypervisors[0].is_running)

    assert stack.pod.state(container, None).status is Status.STOPPED


async def test_shutdown_waits_for_the_last_container(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "0"])
    await stack.pod.wait(container, None)

    assert not await stack.pod.shutdown(now=False)
    await stack.pod.delete(container, None)

    assert await stack.pod.shutdown(now=False)


async def test_pids_always_hold_the_init(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "0"])
    await stack.pod.wait(container, None)

    pids = stack.pod.pids(container)

    assert [row.exec_id for row in pids] == [None]
    assert pids[0].pid >= 1


async def test_an_oom_of_a_known_container_is_an_event(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])

    stack.agent.oom.put_nowait("stranger")
    stack.agent.oom.put_nowait("c1")
    await until(lambda: "TaskOom" in stack.publisher.names())

    assert stack.publisher.names().count("TaskOom") == 1


async def test_the_first_oom_is_marked_in_the_bundle(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    marks: list[str] = []
    stack.host.before_effect = lambda verb, path: marks.append(f"{verb} {path}")

    for _ in range(2):
        stack.agent.oom.put_nowait("c1")
    await until(lambda: stack.publisher.names().count("TaskOom") == 2)

    assert [mark for mark in marks if mark.startswith("write_bytes")] == ["write_bytes /bundles/c1/oom"]


async def test_an_oom_that_cannot_be_marked_in_the_bundle_is_logged_only(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    stack.host.faults.plan({"write_bytes": 1})

    stack.agent.oom.put_nowait("c1")
    await until(lambda: "write_bytes" in stack.host.faults.seen)

    assert (await stack.end(container)).status == 137


async def test_containers_of_a_pod_share_one_vm_and_end_with_the_sandbox(stack: Stack) -> None:
    sandbox = await stack.run("c1", ["sleep"], annotations=SANDBOX)
    app = await stack.run("app", ["sleep"], annotations=MEMBER)
    short = await stack.run("short", ["exit", "0"], annotations=MEMBER)
    await stack.pod.wait(short, None)
    await stack.pod.delete(short, None)
    assert len(stack.hypervisors) == 1
    assert stack.hypervisors[0].is_running

    await stack.pod.kill(sandbox, None, 9, False)

    assert (await stack.pod.wait(sandbox, None)).status == 137
    assert (await stack.pod.wait(app, None)).status == 137
    await stack.pod.delete(sandbox, None)
    assert not await stack.pod.shutdown(now=False)
    await stack.pod.delete(app, None)
    assert await stack.pod.shutdown(now=False)
    assert stack.left() == {}


async def test_a_container_of_an_unknown_sandbox_is_not_found(stack: Stack) -> None:
    with pytest.raises(NotFound, match="no sandbox 'c1'"):
        await stack.create("app", ["sleep"], annotations=MEMBER)


async def _start_unknown(stack: Stack) -> None:
    await stack.pod.start(ContainerId("unknown"), None)


async def _state_of_unknown_exec(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    stack.pod.state(ContainerId("c1"), ExecId("unknown"))


@pytest.mark.parametrize("call", [_start_unknown, _state_of_unknown_exec])
async def test_unknown_names_are_not_found(call: Callable[[Stack], Awaitable[None]], stack: Stack) -> None:
    with pytest.raises(NotFound):
        await call(stack)


async def test_the_guest_gets_the_lines_of_the_pods_resolv_conf(stack: Stack) -> None:
    stack.host.files["/run/pod/resolv.conf"] = b"nameserver 10.0.0.10\n"
    mounts = [{"destination": "/etc/resolv.conf", "type": "bind", "source": "/run/pod/resolv.conf"}]

    await stack.create("c1", ["sleep"], mounts=mounts)

    assert stack.agent.sandbox is not None
    assert list(stack.agent.sandbox.dns) == ["nameserver 10.0.0.10"]


async def test_a_pod_whose_resolv_conf_cannot_be_read_starts_without_name_servers(stack: Stack) -> None:
    mounts = [{"destination": "/etc/resolv.conf", "type": "bind", "source": "/run/pod/gone"}]

    await stack.create("c1", ["sleep"], mounts=mounts)

    assert stack.agent.sandbox is not None
    assert list(stack.agent.sandbox.dns) == []


async def test_a_sandbox_that_names_another_one_does_not_join_it(stack: Stack) -> None:
    """Under CRI-O a pod can write any sandbox's id into the spec of its own, but not the name of a container."""
    crio = {"io.kubernetes.cri-o.SandboxID": "c1"}
    sandbox = {**crio, "io.kubernetes.cri-o.ContainerType": "sandbox", "io.kubernetes.container.name": "POD"}
    container = {**sandbox, "io.kubernetes.cri-o.ContainerType": "container"}
    await stack.run("c1", ["pause"], annotations=sandbox)

    with pytest.raises(InvalidArgument, match="'app' is a sandbox itself and cannot join another"):
        await stack.create("app", ["sleep"], annotations=container)
    assert "app" not in stack.agent.containers

    # Labels are the client's own.
    await stack.run("app", ["sleep"], annotations={**container, "io.kubernetes.container.name": "app"})
    assert "app" in stack.agent.containers


async def test_crio_sees_the_end_of_a_sandbox_after_it_has_left_the_host(stack: Stack) -> None:
    """Its StopPodSandbox waits for that exit only; then the kubelet kills all processes of the pod's cgroup."""
    crio = {"io.kubernetes.cri-o.SandboxID": "c1", "io.kubernetes.cri-o.ContainerType": "sandbox"}
    container = await stack.run("c1", ["sleep"], annotations=crio)
    waiting = asyncio.ensure_future(stack.pod.wait(container, None))

    await stack.pod.kill(container, None, 9, False)
    assert (await waiting).status == 137

    assert not stack.hypervisors[0].is_running
    assert [entry for records in stack.records for entry in records.ledger.entries] == []
    assert (await stack.pod.delete(container, None))[1].status == 137
    assert stack.left() == {}


@pytest.mark.parametrize(
    ("takes_groups", "kernel", "reasons"),
    [
        (False, "6.12.57-amd64", ["QEMU's C virtiofsd"]),
        (True, "6.1.0-56-cloud-amd64", ["Linux 6.1.0-56-cloud-amd64 in the guest"]),
        (True, "6.3.0", []),
        (True, "", []),
    ],
    ids=["file server", "guest", "neither", "not known"],
)
async def test_groups_that_a_share_does_not_know_are_named_once_for_a_pod(
    stack: Stack, caplog: pytest.LogCaptureFixture, takes_groups: bool, kernel: str, reasons: list[str]
) -> None:
    stack.host.share_takes_groups, stack.host.kernel = takes_groups, kernel
    process = {"args": ["sleep"], "cwd": "/", "user": {"uid": 1, "gid": 1, "additionalGids": [1, 1001]}}
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    for name in ("a", "b"):
        await stack.run(name, ["sleep"], annotations=MEMBER, process=process)

    noted = [vars(record) for record in caplog.records if record.getMessage().startswith("supplementary groups")]

    assert [(record["groups"], record["reason"]) for record in noted] == [([1001], reason) for reason in reasons]
