"""The pod's sandbox container, which the shim plays: no image, no container, no process in the guest."""

import asyncio
from collections.abc import Mapping

import pytest

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.task import RootfsMount, Status
from tests.unit.pod.conftest import MEMBER, SANDBOX, Stack, until

SHARED = {"namespaces": [{"type": "pid", "path": "/proc/4242/ns/pid"}]}
OWN = {"namespaces": [{"type": "pid"}]}


async def _pod(stack: Stack, **spec: object) -> ContainerId:
    return await stack.run("c1", ["sleep"], annotations=SANDBOX, **spec)


async def _app(stack: Stack, name: str, linux: Mapping[str, object] = OWN) -> ContainerId:
    return await stack.run(name, ["sleep"], annotations=MEMBER, linux=dict(linux))


async def test_the_guest_gets_nothing_of_the_sandbox_container(stack: Stack) -> None:
    sandbox = await _pod(stack)
    await _app(stack, "app")

    assert list(stack.agent.containers) == ["app"]
    assert not [key for key in stack.host.mounts if "/c1/rootfs" in key]
    assert stack.pod.state(sandbox, None).status is Status.RUNNING


@pytest.mark.parametrize(("signal", "status"), [(9, 137), (15, 0), (2, 0)])
async def test_the_signals_that_end_a_pause_program_end_the_sandbox_container(
    signal: int, status: int, stack: Stack
) -> None:
    sandbox = await _pod(stack)
    app = await _app(stack, "app")

    await stack.pod.kill(sandbox, None, signal, False)

    assert (await stack.pod.wait(sandbox, None)).status == status
    assert (await stack.pod.wait(app, None)).status == 137
    await until(lambda: not stack.hypervisors[0].is_running)


async def test_other_signals_do_not_end_the_sandbox_container(stack: Stack) -> None:
    sandbox = await _pod(stack)

    await stack.pod.kill(sandbox, None, 1, False)
    await asyncio.sleep(0.1)

    assert stack.pod.state(sandbox, None).status is Status.RUNNING


async def test_calls_that_need_no_process_succeed_and_an_exec_is_refused(stack: Stack) -> None:
    sandbox = await _pod(stack)

    await stack.pod.pause(sandbox)
    await stack.pod.resume(sandbox)
    await stack.pod.update(sandbox, {})
    assert (await stack.pod.stats(sandbox)).pids_current == 0
    exec_id = await stack.exec(sandbox, "e1", ["sleep"])
    with pytest.raises(FailedPrecondition, match="runs no programs"):
        await stack.pod.start(sandbox, exec_id)


async def test_a_shared_pid_namespace_brings_it_into_the_guest_before_the_first_container(stack: Stack) -> None:
    sandbox = await _pod(stack)

    await asyncio.gather(_app(stack, "one", SHARED), _app(stack, "two", SHARED))

    assert next(iter(stack.agent.containers)) == "c1"
    assert sorted(stack.agent.containers) == ["c1", "one", "two"]
    assert all(stack.agent.containers[name].sandbox_pidns for name in ("one", "two"))
    assert (await stack.end(sandbox)).status == 137


async def test_a_debug_container_joins_the_processes_of_the_only_container(stack: Stack) -> None:
    """kata-agent shares the first container's namespace; the sandbox container is not made in the guest."""
    await _pod(stack)
    await _app(stack, "app")

    await _app(stack, "debugger", SHARED)
    await _app(stack, "second-debugger", SHARED)

    assert list(stack.agent.containers) == ["app", "debugger", "second-debugger"]
    assert stack.agent.containers["debugger"].sandbox_pidns


async def test_a_debug_container_joins_the_only_container_that_runs_if_the_agent_joins_by_name(stack: Stack) -> None:
    """The pod's first container has been restarted, or has ended while another one runs."""
    stack.agent.remembers = True
    await _pod(stack)
    first = await _app(stack, "app")
    await _app(stack, "sidecar")
    with pytest.raises(FailedPrecondition, match=r"'debugger': .*processes of another container"):
        await _app(stack, "debugger", SHARED)

    await stack.end(first)
    await _app(stack, "debugger", SHARED)

    (joined,) = [each for each in stack.agent.containers["debugger"].OCI.Linux.Namespaces if each.Type == "pid"]
    assert joined.Path == "container:sidecar"


async def test_a_debug_container_is_refused_where_its_target_may_be_another(stack: Stack) -> None:
    """containerd names the target by a pid that all tasks of the pod have; kata-agent shares only the first one's."""
    await _pod(stack)
    first = await _app(stack, "app")
    await _app(stack, "sidecar")

    with pytest.raises(FailedPrecondition, match=r"'debugger': .*processes of another container"):
        await _app(stack, "debugger", SHARED)
    await stack.end(first)
    with pytest.raises(FailedPrecondition, match=r"'debugger': .*processes of another container"):
        await _app(stack, "debugger", SHARED)

    assert list(stack.agent.containers) == ["app", "sidecar"]


async def test_a_mount_inside_its_root_file_system_is_undone_beneath_that_root(stack: Stack) -> None:
    """The guest can write to that root file system, so the undo must not follow a link in it."""
    request = stack.with_rootfs(
        stack.request("c1", ["sleep"], annotations=SANDBOX),
        RootfsMount(type="overlay", source="overlay", target="", options=()),
        RootfsMount(type="bind", source="/data", target="/inner", options=("rbind",)),
    )
    await stack.pod.create(request)
    await stack.pod.start(ContainerId("c1"), None)

    await _app(stack, "one", SHARED)

    root = "/bundles/c1/rootfs"
    entries = {entry.key: entry.detail for entry in stack.records[0].ledger.entries}
    assert (entries[root], entries[f"{root}/inner"]) == ({}, {"beneath": root})


async def test_the_sandbox_container_stays_in_the_guest(stack: Stack) -> None:
    await _pod(stack)
    app = await _app(stack, "one", SHARED)
    await stack.end(app)
    await stack.pod.delete(app, None)

    await _app(stack, "two", SHARED)

    assert stack.agent.calls.count("CreateContainer") == 3


async def test_a_sandbox_container_the_guest_refuses_fails_the_one_that_asked_and_leaves_nothing(stack: Stack) -> None:
    await _pod(stack)
    mounts = list(stack.host.mounts)
    stack.agent.failures["CreateContainer"] = (9, "no pause program")

    with pytest.raises(ShimError, match="no pause program"):
        await _app(stack, "app", SHARED)

    assert list(stack.host.mounts) == mounts
    del stack.agent.failures["CreateContainer"]
    await _app(stack, "app", SHARED)
    assert sorted(stack.agent.containers) == ["app", "c1"]


async def test_the_pods_sysctls_reach_its_containers(stack: Stack) -> None:
    await _pod(stack, linux={"sysctl": {"net.core.somaxconn": "77"}})
    await _app(stack, "app", {**OWN, "sysctl": {"kernel.shmmax": "1"}})

    assert dict(stack.agent.containers["app"].OCI.Linux.Sysctl) == {"net.core.somaxconn": "77", "kernel.shmmax": "1"}


async def test_containers_have_the_pods_host_name(stack: Stack) -> None:
    await _pod(stack, hostname="web-0")
    await _app(stack, "app")

    assert stack.agent.sandbox is not None
    assert stack.agent.sandbox.hostname == "web-0"
    assert stack.agent.containers["app"].OCI.Hostname == "web-0"
