"""OCI hooks in a pod's life: when they run, what they are given, and what their failure leaves."""

import asyncio
import json
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.oci import parse_spec
from pyshim.pod.plan.hooks import hook_state
from tests.fakes.host import FakeHost
from tests.unit.pod.conftest import Stack

FRESH: dict[str, Any] = {"linux": {"namespaces": [{"type": "network"}]}}
POD_NETNS: dict[str, Any] = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/pod"}]}}


def hooks(*kinds: str) -> dict[str, Any]:
    return {"hooks": {kind: [{"path": f"/hooks/{kind}"}] for kind in kinds}}


ON_HOST = hooks("prestart", "createRuntime", "poststart", "poststop")


def seen_by(host: FakeHost) -> list[tuple[str, str, int]]:
    return [(kind, state["status"], state.get("pid", 0)) for kind, _path, state in host.hooks]


async def test_the_four_hooks_of_the_host_run_at_their_points_of_a_containers_life(stack: Stack) -> None:
    container = await stack.create(
        "c1", ["sleep"], **POD_NETNS, **ON_HOST, annotations={"nerdctl/namespace": "default"}
    )
    vm_pid = stack.hypervisors[0].pid
    assert seen_by(stack.host) == [("prestart", "creating", 4711), ("createRuntime", "creating", 4711)]

    await stack.pod.start(container, None)
    assert seen_by(stack.host)[2:] == [("poststart", "running", vm_pid)]

    await stack.pod.kill(container, None, 9, True)
    await stack.pod.wait(container, None)
    assert len(stack.host.hooks) == 3
    await stack.delete_last(container)
    assert seen_by(stack.host)[3:] == [("poststop", "stopped", 0)]
    assert stack.host.hooks[3][2] == {
        "ociVersion": "1.0.2",
        "id": "c1",
        "status": "stopped",
        "bundle": "/bundles/c1",
        "annotations": {"nerdctl/namespace": "default"},
    }


async def test_hooks_run_before_the_network_is_read(stack: Stack) -> None:
    seen = []
    connect = stack.networks.connect

    async def looked(netns_path: str, *args: Any, **options: Any) -> Any:
        seen.append((netns_path, [kind for kind, _path, _state in stack.host.hooks], list(stack.host.mounts)))
        return await connect(netns_path, *args, **options)

    stack.networks.connect = looked  # type: ignore[method-assign]
    await stack.create("c1", ["sleep"], **FRESH, **ON_HOST)

    (netns_path, kinds, mounts) = seen[0]
    assert (netns_path, kinds) == ("/run/netns/pyshim-c1", ["prestart", "createRuntime"])
    assert netns_path in mounts
    assert stack.host.netns_members == [netns_path]
    await stack.delete_last(ContainerId("c1"))


async def test_a_fresh_namespace_without_network_hooks_is_made_without_a_process_in_it(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], **FRESH, **hooks("poststart", "poststop"))

    assert stack.host.netns_members == []
    assert "/run/netns/pyshim-c1" in stack.host.mounts
    await stack.end(ContainerId("c1"))
    await stack.delete_last(ContainerId("c1"))
    assert stack.left() == {}


async def test_hooks_of_a_pods_container_are_given_the_vm(stack: Stack) -> None:
    sandbox = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}
    await stack.run("c1", ["pause"], annotations=sandbox)
    container = {**sandbox, "io.kubernetes.cri.container-type": "container"}

    await stack.run("app", ["sleep"], annotations=container, **hooks("createRuntime", "poststart"))

    pid = stack.hypervisors[0].pid
    assert seen_by(stack.host) == [("createRuntime", "creating", pid), ("poststart", "running", pid)]
    assert {state["id"] for _kind, _path, state in stack.host.hooks} == {"app"}


async def test_poststop_hooks_of_the_sandbox_run_outside_the_cgroups_that_go_with_it(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], **hooks("poststop"))
    await stack.pod.kill(container, None, 9, True)
    await stack.pod.wait(container, None)
    stack.host.cgroup_tree.may_leave.clear()

    deleting = asyncio.ensure_future(stack.pod.delete(container, None))
    await asyncio.sleep(1)
    assert stack.host.hooks == []

    stack.host.cgroup_tree.may_leave.set()
    await deleting
    assert len(stack.host.hooks) == 1


@pytest.mark.parametrize(
    ("step", "ran"),
    [
        ("prestart hook", ["prestart", "poststop"]),
        ("createRuntime hook", ["prestart", "createRuntime", "poststop"]),
        ("connect", ["prestart", "createRuntime", "poststop"]),
        ("netns_member", []),
        ("make_netns", []),
    ],
)
async def test_a_failed_hook_undoes_the_creation_and_poststop_runs(step: str, ran: list[str], stack: Stack) -> None:
    stack.host.faults.plan({step: 1})

    with pytest.raises(ShimError, match=step):
        await stack.create("c1", ["sleep"], **FRESH, **ON_HOST)

    assert [kind for kind, _path, _state in stack.host.hooks] == ran
    assert stack.left() == {}
    await stack.run("c1", ["sleep"])


async def test_a_failed_hook_of_a_pods_container_leaves_the_pod(stack: Stack) -> None:
    sandbox = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}
    await stack.run("c1", ["pause"], annotations=sandbox)
    container = {**sandbox, "io.kubernetes.cri.container-type": "container"}
    stack.host.faults.plan({"createRuntime hook": 1})

    with pytest.raises(FailedPrecondition, match="createRuntime hook"):
        await stack.create("app", ["sleep"], annotations=container, **ON_HOST)

    assert "CreateContainer" not in stack.agent.calls
    await stack.run("app", ["sleep"], annotations=container)


@pytest.mark.parametrize("kind", ["poststart", "poststop"])
async def test_failed_hooks_after_the_start_are_logged_and_the_others_run(
    kind: str, caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    stack.host.faults.plan({f"{kind} hook": 1})
    two = {"hooks": {kind: [{"path": "/hooks/a"}, {"path": "/hooks/b"}]}}

    container = await stack.run("c1", ["sleep"], **two)
    await stack.pod.kill(container, None, 9, True)
    await stack.pod.wait(container, None)
    await stack.delete_last(container)

    assert [path for _kind, path, _state in stack.host.hooks] == ["/hooks/a", "/hooks/b"]

    assert [record.getMessage() for record in caplog.records if "hook" in record.getMessage()] == ["hook failed"]


async def test_hooks_of_the_containers_namespaces_go_to_the_agent(stack: Stack) -> None:
    await stack.create("c1", ["sleep"], **ON_HOST | hooks("prestart", "createContainer", "startContainer"))

    sent = stack.agent.containers["c1"].OCI.Hooks
    assert [hook.Path for hook in sent.CreateContainer] == ["/hooks/createContainer"]
    assert [hook.Path for hook in sent.StartContainer] == ["/hooks/startContainer"]
    assert (list(sent.Prestart), list(sent.Poststop)) == ([], [])


def test_the_state_has_every_annotation_and_a_pid_only_where_there_is_one() -> None:
    document = {"ociVersion": "1.1.0", "process": {"args": ["sh"]}, "root": {"path": "r"}, "annotations": {"a": "ü"}}
    spec = parse_spec(json.dumps(document).encode(), "config.json")

    state = json.loads(hook_state(spec, container_id="c", bundle="/b", status="creating", pid=0))

    assert state == {"ociVersion": "1.1.0", "id": "c", "status": "creating", "bundle": "/b", "annotations": {"a": "ü"}}
