"""The Sandbox API through a real ttrpc server and client."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_sandboxes import EXIT, some_stats
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from protos.cgroups import v1_pb2, v2_pb2
from protos.containerd import sandbox_pb2 as pb
from protos.containerd import types_pb2
from protos.cri import v1_pb2 as cri
from pyshim.model.errors import NotFound
from pyshim.model.guest import ContainerStats
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import SandboxId
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns, PodResourceSums, SandboxReport
from pyshim.model.task import ExitStatus
from pyshim.task.calls import Calls
from pyshim.task.sandbox_service import SANDBOX_SERVICE, SandboxService
from pyshim.ttrpc import Client, Code, RemoteError
from tests.fakes.served import served

pytestmark = pytest.mark.usefixtures("fast_clock")

CREATED_AT_NS = 1_700_000_000_000_000_003
POD_CONFIG = "runtime.v1.PodSandboxConfig"


class FakeSandbox:
    """The sandbox `p1` is there; every call is recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.exited = asyncio.Event()

    def _enter(self, *call: Any) -> None:
        self.calls.append(call)
        if call[1] != "p1":
            raise NotFound(f"find sandbox '{call[1]}': no such sandbox in this shim")

    async def create(self, request: CreateSandbox) -> None:
        self.calls.append(("create", request))

    async def start(self, sandbox_id: SandboxId) -> SandboxReport:
        self._enter("start", sandbox_id)
        return self.status(sandbox_id, verbose=False)

    def check(self, sandbox_id: SandboxId) -> None:
        self._enter("check", sandbox_id)

    async def stop(self, sandbox_id: SandboxId) -> None:
        self._enter("stop", sandbox_id)

    async def update(self, sandbox_id: SandboxId, resources: Mapping[str, Any]) -> None:
        self._enter("update", sandbox_id, resources)

    async def wait(self, sandbox_id: SandboxId) -> ExitStatus:
        self._enter("wait", sandbox_id)
        await self.exited.wait()
        return EXIT

    def status(self, sandbox_id: SandboxId, verbose: bool) -> SandboxReport:
        self._enter("status", sandbox_id, verbose)
        ended = self.exited.is_set()
        return SandboxReport(
            sandbox_id=sandbox_id,
            pid=4321,
            is_ready=not ended,
            created_at_ns=CREATED_AT_NS,
            exit=EXIT if ended else None,
            info={"vm": "{}"} if verbose else {},
            spec={"hostname": "web-0"},
        )

    async def ping(self, sandbox_id: SandboxId) -> None:
        self._enter("ping", sandbox_id)

    async def stats(self, sandbox_id: SandboxId) -> ContainerStats:
        self._enter("stats", sandbox_id)
        return some_stats()

    async def shutdown(self, sandbox_id: SandboxId) -> None:
        self._enter("shutdown", sandbox_id)


class Bench:
    def __init__(self, client: Client, sandbox: FakeSandbox, finished: asyncio.Event) -> None:
        self.client = client
        self.sandbox = sandbox
        self.finished = finished

    async def call(self, method: str, request: Message | bytes) -> bytes:
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        return await self.client.call(SANDBOX_SERVICE, method, payload, timeout_s=30)


@asynccontextmanager
async def bench(mode: CgroupMode = CgroupMode.V2) -> AsyncIterator[Bench]:
    sandbox, finished = FakeSandbox(), asyncio.Event()
    service = SandboxService(sandbox=sandbox, cgroup_mode=mode, calls=Calls(), on_shutdown=finished.set)
    async with served(service.services()) as (_, client):
        yield Bench(client, sandbox, finished)


def create_request(options: Message | None = None, url: str = POD_CONFIG, **fields: Any) -> pb.CreateSandboxRequest:
    request = pb.CreateSandboxRequest(**{"sandbox_id": "p1", "bundle_path": "/b/p1", **fields})
    if options is not None:
        request.options.CopyFrom(AnyMessage(type_url=url, value=options.SerializeToString()))
    return request


async def test_every_method_of_the_service_definition_is_served() -> None:
    service = SandboxService(sandbox=FakeSandbox(), cgroup_mode=CgroupMode.V2, calls=Calls(), on_shutdown=lambda: None)
    names = {method.name for method in pb.DESCRIPTOR.services_by_name["Sandbox"].methods}
    served = {name: set(methods) for name, methods in service.services().items()}
    assert served == {SANDBOX_SERVICE: names}


async def test_a_pod_with_a_user_namespace_of_the_host_is_refused() -> None:
    """`hostUsers: false`; with `true`, the kubelet sends the mode NODE, or nothing."""

    def pod(mode: cri.NamespaceMode) -> cri.PodSandboxConfig:
        options = cri.NamespaceOption(userns_options=cri.UserNamespace(mode=mode))
        security = cri.LinuxSandboxSecurityContext(namespace_options=options)
        return cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(security_context=security))

    async with bench() as b:
        with pytest.raises(RemoteError, match=r"create sandbox 'p1': .* no user namespace of the host") as caught:
            await b.call("CreateSandbox", create_request(pod(cri.POD)))
        await b.call("CreateSandbox", create_request(pod(cri.NODE)))

        assert caught.value.code == Code.UNIMPLEMENTED


async def test_a_pods_configuration_arrives_whole() -> None:
    config = cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name="web", uid="u1", namespace="default"),
        hostname="web-0",
        dns_config=cri.DNSConfig(servers=["10.0.0.10"], searches=["svc"], options=["ndots:5"]),
        annotations={"io.katacontainers.config.hypervisor.default_vcpus": "2"},
        linux=cri.LinuxPodSandboxConfig(
            cgroup_parent="/kubepods/podu1",
            sysctls={"net.core.somaxconn": "512"},
            resources=cri.LinuxContainerResources(
                cpu_period=100_000, cpu_quota=150_000, cpu_shares=1536, memory_limit_in_bytes=512 << 20
            ),
            security_context=cri.LinuxSandboxSecurityContext(
                namespace_options=cri.NamespaceOption(
                    network=cri.NamespaceMode.POD, pid=cri.NamespaceMode.CONTAINER, ipc=cri.NamespaceMode.NODE
                )
            ),
        ),
    )

    async with bench() as b:
        await b.call("CreateSandbox", create_request(config, netns_path="/run/netns/x", annotations={"a": "b"}))

        ((_, request),) = b.sandbox.calls
        assert request == CreateSandbox(
            sandbox_id=SandboxId("p1"),
            bundle="/b/p1",  # type: ignore[arg-type]
            netns_path="/run/netns/x",
            annotations={"a": "b"},
            pod=PodConfig(
                name="web",
                namespace="default",
                uid="u1",
                hostname="web-0",
                dns=PodDns(servers=("10.0.0.10",), searches=("svc",), options=("ndots:5",)),
                annotations={"io.katacontainers.config.hypervisor.default_vcpus": "2"},
                cgroup_parent="/kubepods/podu1",
                sysctls={"net.core.somaxconn": "512"},
                resources=PodResourceSums(
                    cpu_period=100_000, cpu_quota=150_000, cpu_shares=1536, memory_bytes=512 << 20
                ),
                host_namespaces=frozenset({"ipc"}),
            ),
        )


async def test_an_empty_configuration_states_neither_resources_nor_dns() -> None:
    async with bench() as b:
        await b.call("CreateSandbox", create_request(cri.PodSandboxConfig(), url=f"type.googleapis.com/{POD_CONFIG}"))

        pod = b.sandbox.calls[0][1].pod
        assert (pod.resources, pod.dns, pod.host_namespaces) == (None, None, frozenset())


async def test_a_request_without_options_names_no_pod() -> None:
    async with bench() as b:
        await b.call("CreateSandbox", create_request())

        assert b.sandbox.calls[0][1].pod is None


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        pytest.param(b"\xff", "CreateSandboxRequest: ", id="no-message"),
        pytest.param(create_request(sandbox_id=""), "check sandbox id", id="no-id"),
        pytest.param(create_request(sandbox_id="../p1"), "check sandbox id", id="path-as-id"),
        pytest.param(create_request(bundle_path="b"), "bundle of sandbox 'p1'", id="relative-bundle"),
        pytest.param(create_request(netns_path="x"), "network namespace of sandbox 'p1'", id="relative-netns"),
        pytest.param(
            create_request(pb.PingRequest(), url="runc.Options"),
            "create sandbox 'p1': the options are of type 'runc.Options', not 'runtime.v1.PodSandboxConfig'",
            id="other-options",
        ),
        pytest.param(
            pb.CreateSandboxRequest(
                sandbox_id="p1", bundle_path="/b", options=AnyMessage(type_url=POD_CONFIG, value=b"\xff")
            ),
            "create sandbox 'p1': decode runtime.v1.PodSandboxConfig: ",
            id="broken-options",
        ),
    ],
)
async def test_a_bad_request_is_refused_by_name(request_: Message | bytes, problem: str) -> None:
    async with bench() as b:
        with pytest.raises(RemoteError) as caught:
            await b.call("CreateSandbox", request_)

        assert caught.value.code == Code.INVALID_ARGUMENT
        assert problem in str(caught.value)
        assert b.sandbox.calls == []


@pytest.mark.parametrize(
    "method",
    [
        "StartSandbox",
        "Platform",
        "StopSandbox",
        "UpdateSandbox",
        "WaitSandbox",
        "SandboxStatus",
        "PingSandbox",
        "SandboxMetrics",
    ],
)
async def test_an_unknown_sandbox_is_not_found(method: str) -> None:
    async with bench() as b:
        with pytest.raises(RemoteError) as caught:
            await b.call(method, pb.PingRequest(sandbox_id="p2"))

        assert caught.value.code == Code.NOT_FOUND


async def test_start_and_status_are_in_containerds_words() -> None:
    async with bench() as b:
        ref = pb.PingRequest(sandbox_id="p1")
        started = pb.StartSandboxResponse.FromString(await b.call("StartSandbox", ref))
        assert (started.pid, started.created_at.ToNanoseconds()) == (4321, CREATED_AT_NS)
        assert started.spec.type_url == "types.containerd.io/opencontainers/runtime-spec/1/Spec"
        assert json.loads(started.spec.value) == {"hostname": "web-0"}

        plain = pb.SandboxStatusResponse.FromString(await b.call("SandboxStatus", ref))
        assert (plain.state, plain.pid, dict(plain.info)) == ("SANDBOX_READY", 4321, {})
        assert not plain.HasField("exited_at")

        b.sandbox.exited.set()
        request = pb.SandboxStatusRequest(sandbox_id="p1", verbose=True)
        ended = pb.SandboxStatusResponse.FromString(await b.call("SandboxStatus", request))
        assert (ended.state, dict(ended.info)) == ("SANDBOX_NOTREADY", {"vm": "{}"})
        assert ended.exited_at.ToNanoseconds() == EXIT.exited_at_ns


async def test_the_platform_is_the_nodes_in_gos_words() -> None:
    async with bench() as b:
        reply = pb.PlatformResponse.FromString(await b.call("Platform", pb.PlatformRequest(sandbox_id="p1")))

        machine = os.uname().machine
        assert (reply.platform.os, reply.platform.architecture) == (
            "linux",
            {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
        )


RESOURCES = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"
CRI_RESOURCES = "io.containerd.cri.v1/UpdatedResources"


def update_request(value: bytes, url: str = RESOURCES) -> pb.UpdateSandboxRequest:
    return pb.UpdateSandboxRequest(sandbox_id="p1", resources=AnyMessage(type_url=url, value=value))


async def test_an_update_has_the_resources_of_a_task_update() -> None:
    async with bench() as b:
        await b.call("UpdateSandbox", update_request(b'{"cpu": {"quota": 5}}'))
        await b.call("UpdateSandbox", pb.UpdateSandboxRequest(sandbox_id="p1"))

        assert b.sandbox.calls == [("update", "p1", {"cpu": {"quota": 5}}), ("update", "p1", {})]


def new_sandbox(value: bytes, *fields: str, url: str = CRI_RESOURCES) -> pb.UpdateSandboxRequest:
    """As containerd 2.4 sends an update: the whole sandbox, and the names of what has changed."""
    extension = AnyMessage(type_url=url, value=value)
    sandbox = types_pb2.Sandbox(sandbox_id="p1", extensions={"updated-resources": extension})
    return pb.UpdateSandboxRequest(sandbox_id="p1", sandbox=sandbox, fields=fields)


@pytest.mark.parametrize("fields", [("extensions",), ("extensions.updated-resources",), ()])
async def test_an_update_of_the_sandbox_has_the_limits_of_the_pod_without_its_overhead(fields: tuple[str, ...]) -> None:
    limits = b'{"cpu_period": 100000, "cpu_quota": 150000, "memory_limit_in_bytes": 1048576, "cpuset_cpus": "0"}'
    async with bench() as b:
        await b.call("UpdateSandbox", new_sandbox(b'{"Overhead": {"cpu_quota": 9}, "Resources": %s}' % limits, *fields))
        await b.call("UpdateSandbox", new_sandbox(b'{"Overhead": {"cpu_quota": 9}, "Resources": null}', *fields))

        first = {"cpu": {"period": 100000, "quota": 150000}, "memory": {"limit": 1048576}}
        assert b.sandbox.calls == [("update", "p1", first), ("update", "p1", {})]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(new_sandbox(b"{}", "labels"), id="other-field"),
        pytest.param(new_sandbox(b"{}", "extensions", "labels"), id="another-field"),
        pytest.param(pb.UpdateSandboxRequest(sandbox_id="p1", sandbox=types_pb2.Sandbox()), id="no-resources"),
    ],
)
async def test_an_update_of_anything_but_resources_is_unimplemented(request_: Message) -> None:
    async with bench() as b:
        with pytest.raises(RemoteError, match="update sandbox 'p1': no resources among what has changed") as caught:
            await b.call("UpdateSandbox", request_)

        assert caught.value.code == Code.UNIMPLEMENTED
        assert b.sandbox.calls == []


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        pytest.param(new_sandbox(b"{}", url="x.Y"), "type 'x.Y' is not", id="other-type"),
        pytest.param(new_sandbox(b'{"Resources": 7}'), "'Resources' is not a JSON object", id="no-object"),
        pytest.param(new_sandbox(b'{"Resources": {"cpu_quota": "7"}}'), "cpu_quota is not an integer", id="text"),
        pytest.param(new_sandbox(b'{"Resources": {"cpu_quota": true}}'), "cpu_quota is not an integer", id="bool"),
    ],
)
async def test_bad_resources_of_a_sandbox_are_refused_by_name(request_: Message, problem: str) -> None:
    async with bench() as b:
        with pytest.raises(
            RemoteError, match=f"decode extension 'updated-resources' of sandbox 'p1': {problem}"
        ) as caught:
            await b.call("UpdateSandbox", request_)

        assert caught.value.code == Code.INVALID_ARGUMENT
        assert b.sandbox.calls == []


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        pytest.param(update_request(b"{}", url="runc.Options"), "type 'runc.Options' is not", id="other-type"),
        pytest.param(update_request(b"{"), "not JSON", id="broken"),
        pytest.param(update_request(b"[]"), "not a JSON object", id="no-object"),
    ],
)
async def test_a_bad_update_is_refused_by_name(request_: Message, problem: str) -> None:
    async with bench() as b:
        with pytest.raises(RemoteError, match=rf"decode resources of sandbox 'p1': {problem}") as caught:
            await b.call("UpdateSandbox", request_)

        assert caught.value.code == Code.INVALID_ARGUMENT
        assert b.sandbox.calls == []


async def test_wait_answers_at_the_end_while_other_calls_go_on() -> None:
    async with bench() as b:
        ref = pb.PingRequest(sandbox_id="p1")
        waiting = asyncio.create_task(b.call("WaitSandbox", ref))
        await b.call("PingSandbox", ref)
        assert not waiting.done()

        b.sandbox.exited.set()
        reply = pb.WaitSandboxResponse.FromString(await waiting)

        assert (reply.exit_status, reply.exited_at.ToNanoseconds()) == (EXIT.status, EXIT.exited_at_ns)


@pytest.mark.parametrize(
    ("mode", "kind"), [(CgroupMode.V1, v1_pb2.Metrics), (CgroupMode.V2, v2_pb2.Metrics)], ids=["v1", "v2"]
)
async def test_metrics_have_the_form_of_the_hosts_cgroups(mode: CgroupMode, kind: type[Message]) -> None:
    async with bench(mode) as b:
        reply = pb.SandboxMetricsResponse.FromString(
            await b.call("SandboxMetrics", pb.SandboxMetricsRequest(sandbox_id="p1"))
        )

        assert reply.metrics.id == "p1"
        assert reply.metrics.data.type_url == kind.DESCRIPTOR.full_name
        assert kind.FromString(reply.metrics.data.value).ByteSize() > 0


async def test_a_shutdown_ends_the_shim_once_it_is_done() -> None:
    async with bench() as b:
        with pytest.raises(RemoteError):
            await b.call("ShutdownSandbox", pb.ShutdownSandboxRequest(sandbox_id="p2"))
        assert not b.finished.is_set()

        await b.call("ShutdownSandbox", pb.ShutdownSandboxRequest(sandbox_id="p1"))

        assert b.finished.is_set()
