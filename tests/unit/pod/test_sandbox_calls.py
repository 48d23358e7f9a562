"""A pod by containerd's Sandbox API: its VM is there before and after its containers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
    Unavailable,
)
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns, PodResourceSums
from pyshim.model.task import EXIT_KILLED, EXIT_SANDBOX_LOST, Status
from pyshim.pod.sandbox_calls import SandboxCalls
from pyshim.resources.network.plan.relay import BUILT_PROGRAM
from tests.fakes.hypervisor import FakeHypervisor
from tests.unit.pod.conftest import BUNDLES, DOCUMENT, SANDBOX, Stack, outcomes, until

POD = SandboxId("p1")
CONFIG = PodConfig(
    name="web",
    namespace="default",
    uid="u1",
    hostname="web-0",
    dns=PodDns(servers=("10.0.0.10",), searches=("svc.local",), options=("ndots:5",)),
    annotations={},
    cgroup_parent="/kubepods/podu1",
    sysctls={},
    resources=PodResourceSums(cpu_period=100_000, cpu_quota=150_000, cpu_shares=1536, memory_bytes=512 << 20),
    host_namespaces=frozenset(),
)
HOOK = {"path": "/hooks/any"}
IN_POD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": POD,
    "io.kubernetes.cri.sandbox-uid": "u1",
}


def request(pod: PodConfig | None = CONFIG, sandbox_id: SandboxId = POD) -> CreateSandbox:
    return CreateSandbox(
        sandbox_id=sandbox_id,
        bundle=HostPath(f"{BUNDLES}/{sandbox_id}"),
        netns_path="/run/netns/p1",
        annotations={},
        pod=pod,
    )


@pytest.fixture
def api(stack: Stack) -> SandboxCalls:
    return stack.sandbox_calls


async def run_pod(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())
    await api.start(POD)


async def test_a_pod_is_ready_from_start_to_stop_and_leaves_nothing(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())
    assert stack.hypervisors == []
    assert api.status(POD, verbose=False).is_ready is False

    started = await api.start(POD)
    assert started.is_ready
    assert started.pid == stack.hypervisors[0].pid
    waiting = asyncio.create_task(api.wait(POD))
    container = await stack.run("app", ["sleep"], annotations=IN_POD)
    await stack.end(container)
    await stack.pod.delete(container, None)
    assert await stack.pod.shutdown(now=False) is False
    assert api.status(POD, verbose=False).is_ready
    assert not waiting.done()

    await api.stop(POD)
    assert (await waiting).status == 0
    assert api.status(POD, verbose=False).exit is not None
    await api.shutdown(POD)
    assert stack.left() == {}


async def test_the_vm_is_that_of_a_pod_with_a_pause_container(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)

    sent = stack.agent.sandbox
    assert sent is not None
    assert sent.hostname == "web-0"
    assert list(sent.dns) == ["nameserver 10.0.0.10", "search svc.local", "options ndots:5"]
    snapshot = stack.records[0].snapshots[-1]
    assert (snapshot.netns_path, snapshot.owner, snapshot.containers) == ("/run/netns/p1", None, ())
    assert snapshot.pod == "default/web"
    assert [path for path in stack.host.cgroup_tree.there if path.startswith("/kubepods/podu1/")]


async def test_a_container_has_the_pods_files_unless_it_has_its_own(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)
    own = {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts", "options": ["rbind"]}

    await stack.create("app", ["sleep"], annotations=IN_POD, mounts=[own])

    mounts = stack.agent.containers["app"].OCI.Mounts
    assert [mount.destination for mount in mounts] == ["/etc/hosts", "/etc/resolv.conf", "/etc/hostname"]
    assert stack.host.files[f"{BUNDLES}/p1/hostname"] == b"web-0\n"
    assert stack.host.files[f"{BUNDLES}/p1/resolv.conf"].startswith(b"nameserver 10.0.0.10\nsearch svc.local\n")


async def test_a_pod_in_the_hosts_network_without_a_name_has_the_nodes(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request(replace(CONFIG, hostname="", host_namespaces=frozenset({"network"}))))

    assert stack.host.files[f"{BUNDLES}/p1/hostname"] == b"node-7\n"


async def test_calls_for_a_sandbox_that_is_not_there_are_refused(stack: Stack, api: SandboxCalls) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: api.start(POD),
        lambda: api.stop(POD),
        lambda: api.update(POD, {}),
        lambda: api.wait(POD),
        lambda: api.ping(POD),
        lambda: api.stats(POD),
    ]
    for known in (False, True):
        if known:
            await api.create(request(sandbox_id=SandboxId("other")))
        for call in calls:
            with pytest.raises(NotFound, match=r"^find sandbox 'p1': "):
                await call()
        for look in (lambda: api.check(POD), lambda: api.status(POD, verbose=True)):
            with pytest.raises(NotFound):
                look()


@pytest.mark.parametrize("ended", [False, True], ids=["not-started", "ended"])
async def test_calls_that_need_the_vm_are_refused_without_it(stack: Stack, api: SandboxCalls, ended: bool) -> None:
    await api.create(request())
    if ended:
        await api.start(POD)
        await api.stop(POD)

    calls: list[Callable[[], Any]] = [lambda: api.ping(POD), lambda: api.stats(POD), lambda: api.update(POD, {})]
    for call in calls:
        with pytest.raises(FailedPrecondition, match=r"^use sandbox 'p1': it has"):
            await call()


async def test_a_sandbox_is_created_once(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())

    with pytest.raises(AlreadyExists, match=r"^create sandbox 'p2': this shim has 'p1'"):
        await api.create(request(sandbox_id=SandboxId("p2")))


async def test_a_shim_with_a_pod_of_the_task_api_refuses_a_sandbox(stack: Stack, api: SandboxCalls) -> None:
    await stack.create("c1", ["pause"])

    with pytest.raises(FailedPrecondition, match=r"^create sandbox 'p1': this shim already runs 'c1'"):
        await api.create(request())


async def test_a_served_sandbox_refuses_a_pod_of_the_task_api(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())

    sandbox = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}
    with pytest.raises(FailedPrecondition, match=r"^create sandbox 'c1': "):
        await stack.create("c1", ["pause"], annotations=sandbox)


async def test_a_container_before_the_start_is_refused(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())

    with pytest.raises(NotFound, match=r"no sandbox 'p1' in this shim"):
        await stack.create("app", ["sleep"], annotations=IN_POD)


async def test_a_container_without_annotations_is_of_the_sandbox(stack: Stack, api: SandboxCalls) -> None:
    """`ctr run --sandbox` makes such a container."""
    await run_pod(stack, api)

    await stack.run("app", ["sleep"])

    assert len(stack.hypervisors) == 1


async def test_repeated_starts_and_stops_give_the_first_ones_answer(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())
    first, second = await asyncio.gather(api.start(POD), api.start(POD))
    third = await api.start(POD)
    assert first == second == third
    assert len(stack.hypervisors) == 1

    await asyncio.gather(api.stop(POD), api.stop(POD))
    ended = await api.wait(POD)
    await api.stop(POD)

    assert await api.wait(POD) == ended
    with pytest.raises(FailedPrecondition, match="it has ended"):
        await api.start(POD)


async def test_a_stop_before_the_start_ends_the_wait(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())
    waiting = asyncio.create_task(api.wait(POD))
    await asyncio.sleep(0)

    await api.stop(POD)

    assert (await waiting).status == 0


@pytest.mark.parametrize("step", ["config", "capacity", "connect"])
async def test_a_start_that_fails_leaves_nothing_and_can_be_repeated(
    stack: Stack, api: SandboxCalls, step: str
) -> None:
    stack.host.faults.plan({step: 1})
    await api.create(request())

    with pytest.raises(ShimError):
        await api.start(POD)
    assert stack.left() == {}
    assert stack.pod.is_empty

    assert (await api.start(POD)).is_ready


async def test_a_start_that_is_stopped_before_its_first_step_leaves_nothing(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())

    assert await outcomes(api.start(POD), api.stop(POD)) == [Cancelled, None]
    assert stack.hypervisors == []
    assert stack.left() == {}


async def test_a_caller_that_gives_up_its_start_ends_nothing(stack: Stack, api: SandboxCalls) -> None:
    stack.host.write_spec(f"{BUNDLES}/p1", ["pause"], hooks={"prestart": [HOOK], "poststop": [HOOK]})
    await api.create(request(pod=None))
    reached = asyncio.Event()
    stack.on_connected = reached.set
    starting = asyncio.create_task(api.start(POD))
    await reached.wait()

    starting.cancel()
    await asyncio.wait([starting])

    assert (await api.start(POD)).is_ready
    assert [kind for kind, *_ in stack.host.hooks] == ["prestart"]
    await api.stop(POD)
    assert [kind for kind, *_ in stack.host.hooks] == ["prestart", "poststop"]


async def test_a_stop_while_the_vm_boots_undoes_it(stack: Stack, api: SandboxCalls) -> None:
    await api.create(request())
    reached = asyncio.Event()
    stack.on_connected = reached.set
    starting = asyncio.create_task(api.start(POD))
    await reached.wait()

    await api.stop(POD)

    with pytest.raises(ShimError):
        await starting
    assert stack.left() == {}


async def test_a_lost_vm_ends_the_wait_and_its_containers(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)
    container = await stack.run("app", ["sleep"], annotations=IN_POD)
    waiting = asyncio.create_task(api.wait(POD))

    stack.hypervisors[0].die("qemu exited 1")

    assert (await waiting).status == EXIT_SANDBOX_LOST
    assert api.status(POD, verbose=False).is_ready is False
    assert (await stack.pod.wait(container, None)).status == EXIT_SANDBOX_LOST
    with pytest.raises(ShimError):
        await stack.create("late", ["sleep"], annotations=IN_POD)
    with pytest.raises(FailedPrecondition, match="it has ended"):
        await api.stats(POD)


async def test_a_lost_sandbox_has_ended_once_its_vm_has(
    stack: Stack, api: SandboxCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd never stops a sandbox that has ended, and the VMM may end slowly."""
    may_go, stop = asyncio.Event(), FakeHypervisor.stop

    async def slow_stop(hypervisor: FakeHypervisor) -> None:
        await may_go.wait()
        await stop(hypervisor)

    monkeypatch.setattr(FakeHypervisor, "stop", slow_stop)
    await run_pod(stack, api)
    waiting = asyncio.create_task(api.wait(POD))
    stack.hypervisors[0].die("qemu exited 1")
    assert await asyncio.wait([waiting], timeout=0.1) == (set(), {waiting})
    stopping = asyncio.create_task(api.stop(POD))
    assert await asyncio.wait([waiting, stopping], timeout=0.1) == (set(), {waiting, stopping})
    assert api.status(POD, verbose=False).is_ready

    may_go.set()

    await stopping
    assert (await waiting).status == EXIT_SANDBOX_LOST
    assert stack.left() == {}


async def test_a_stop_ends_the_containers_that_are_left(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)
    container = await stack.run("app", ["sleep"], annotations=IN_POD)

    await api.stop(POD)

    assert (await stack.pod.wait(container, None)).status == EXIT_KILLED
    assert stack.pod.state(container, None).status is Status.STOPPED
    await stack.pod.delete(container, None)
    await api.shutdown(POD)


async def test_a_shutdown_without_a_stop_ends_all(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)
    await stack.run("app", ["sleep"], annotations=IN_POD)
    waiting = asyncio.create_task(api.wait(POD))
    await asyncio.sleep(0)

    await api.shutdown(POD)

    assert (await waiting).status == 0
    assert stack.left() == {}
    with pytest.raises(Unavailable, match="the shim is ending"):
        await stack.create("late", ["sleep"], annotations=IN_POD)


async def test_a_shutdown_after_a_refused_create_ends_the_shim(stack: Stack, api: SandboxCalls) -> None:
    """containerd calls ShutdownSandbox for a sandbox that it could not create."""
    with pytest.raises(InvalidArgument, match=r"^create sandbox 'p1': neither options of type .* nor '.*config.json'"):
        await api.create(request(pod=None))

    await api.shutdown(POD)

    assert stack.pod.is_empty


async def test_a_sandbox_by_the_spec_in_its_bundle(stack: Stack, api: SandboxCalls) -> None:
    """`ctr sandboxes run` makes such a sandbox."""
    stack.host.write_spec(f"{BUNDLES}/p1", ["pause"], hostname="by-spec")
    await api.create(request(pod=None))

    await api.start(POD)

    assert stack.agent.sandbox is not None
    assert stack.agent.sandbox.hostname == "by-spec"


async def test_the_spec_of_a_pods_container_opens_no_sandbox(stack: Stack, api: SandboxCalls) -> None:
    stack.host.write_spec(f"{BUNDLES}/p1", ["sleep"], annotations=IN_POD)

    with pytest.raises(InvalidArgument, match=r"'.*config.json' is of a container in a pod$"):
        await api.create(request(pod=None))


async def test_the_metrics_are_those_of_the_sandboxs_cgroup(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)

    stats = await api.stats(POD)

    assert (stats.cpu.total_ns, stats.memory.usage.usage_bytes, stats.pids_current) == (5_000_000, 3 << 20, 7)


async def test_a_verbose_status_says_how_the_vm_came_to_be(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)

    info = api.status(POD, verbose=True).info

    assert set(info) == {"info", "vm", "sizing"}
    known = json.loads(info["info"])
    assert known["pid"] == stack.hypervisors[0].pid
    assert {"type": "network", "path": "/run/netns/p1"} in known["runtimeSpec"]["linux"]["namespaces"]
    assert f'"vmmPid": {stack.hypervisors[0].pid}' in info["vm"]
    assert '"origin": "booted"' in info["vm"]
    assert "sandbox-cpu-quota" in info["sizing"]


async def test_a_ping_reaches_the_agent(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)

    await api.ping(POD)


async def test_the_state_goes_with_the_sandbox_not_with_its_last_container(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)
    container = await stack.run("app", ["sleep"], annotations=IN_POD)
    await stack.end(container)
    await stack.pod.delete(container, None)
    assert not stack.records[0].removed
    assert stack.records[0].snapshots[-1].containers == ()

    await api.stop(POD)

    await until(lambda: stack.records[0].removed)
    assert stack.pod.connect(ContainerId("app")) == 0


async def test_a_process_of_the_shim_keeps_the_shared_pid_namespace(stack: Stack, api: SandboxCalls) -> None:
    """kata-agent shares the pid namespace of the pod's first container, which may end before the others."""
    stack.host.files[BUILT_PROGRAM] = b"relay"
    await run_pod(stack, api)
    shared = {"namespaces": [{"type": "pid", "path": "/proc/4242/ns/pid"}]}

    await asyncio.gather(*(stack.run(name, ["sleep"], annotations=IN_POD, linux=shared) for name in ("one", "two")))

    first, *others = stack.agent.containers
    assert first == "p1-processes"
    assert sorted(others) == ["one", "two"]
    assert stack.agent.calls.count("CreateContainer") == 3
    assert [namespace.Type for namespace in stack.agent.containers[first].OCI.Linux.Namespaces][-1] == "pid"
    assert all(stack.agent.containers[name].sandbox_pidns for name in others)


async def test_a_pod_without_a_shared_pid_namespace_has_no_such_process(stack: Stack, api: SandboxCalls) -> None:
    await run_pod(stack, api)

    await stack.run("one", ["sleep"], annotations=IN_POD, linux={"namespaces": [{"type": "pid"}]})

    assert list(stack.agent.containers) == ["one"]


@pytest.mark.parametrize("bundle", ["/", "/run/containerd", f"{BUNDLES}/{POD}/..", f"{BUNDLES}/other"])
async def test_a_bundle_that_does_not_bear_the_sandboxs_name_gets_no_files(
    stack: Stack, api: SandboxCalls, bundle: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"create sandbox .*: bundle .* has another name"):
        await api.create(replace(request(), bundle=HostPath(bundle)))

    assert stack.left() == {}


@pytest.mark.parametrize("sandbox_api", [True, False], ids=["Sandbox API", "Task API"])
@pytest.mark.parametrize("permitted", [False, True], ids=["as shipped", "the control"])
async def test_an_authors_annotation_takes_no_device_of_the_node(
    stack: Stack, api: SandboxCalls, sandbox_api: bool, permitted: bool
) -> None:
    forged = {"cdi.k8s.io/x": "vendor.com/class=vfio"}
    questions: list[DeviceQuestion] = []

    async def find(question: DeviceQuestion) -> PodDevices:
        questions.append(question)
        return PodDevices()

    stack.find_devices = find
    qemu = {**DOCUMENT["hypervisor"]["qemu"], "cold_plug_vfio": "root-port"}
    stack.document = {
        "hypervisor": {"qemu": qemu},
        "runtime": {"pod_annotations": ["cdi.k8s.io/*"]} if permitted else {},
    }
    if sandbox_api:
        await api.create(request(replace(CONFIG, annotations=forged)))
        await api.start(POD)
    else:
        await stack.run("c1", ["sleep"], annotations={**SANDBOX, **forged})

    assert questions[0].annotations == (forged if permitted else {})
