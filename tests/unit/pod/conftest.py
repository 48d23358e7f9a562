"""A pod on fakes: memory for the host, a scripted guest agent behind a real ttrpc connection."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.agent.client import AgentClient
from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.errors import NotFound, ShimError
from pyshim.model.guest import AgentAddress
from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, HostFacts, Machine
from pyshim.model.ids import ContainerId, ExecId, HostPath
from pyshim.model.observation import NO_PARENT, Span, Trace
from pyshim.model.seams import Records
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, Identity, RootfsMount, Stdio
from pyshim.model.vm import Device, GuestLocation
from pyshim.node.nri.description import machine
from pyshim.pod.environment import Environment
from pyshim.pod.pod import Pod
from pyshim.pod.sandbox_calls import SandboxCalls
from pyshim.resources.placement_call import AskPlacement
from pyshim.ttrpc import Client
from tests.fakes.absent import no_devices, no_plugin
from tests.fakes.agent import FakeAgent
from tests.fakes.facts import PLENTY, host_facts
from tests.fakes.host import FakeHost, FakePublisher, FakeRecords, Faults
from tests.fakes.machines import ONE_NODE
from tests.fakes.network import FakeNetworks
from tests.fakes.vm import FakeVm

BUNDLES = "/bundles"
SANDBOX = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}
"""Annotations of a pod's sandbox `c1`."""
MEMBER = {**SANDBOX, "io.kubernetes.cri.container-type": "container"}
"""Annotations of a container in it."""
NO_STDIO = Stdio(stdin="", stdout="", stderr="", terminal=False)
PIPES = Stdio(stdin="/in", stdout="/out", stderr="/err", terminal=False)

FACTS = host_facts(cpu_count=4, memory_mib=8192)
CAPACITY = replace(PLENTY, available_mib=8000)
DOCUMENT: Mapping[str, Any] = {
    "hypervisor": {
        "qemu": {"path": "/bin/qemu", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}
    }
}


class FakeConnector:
    def __init__(self, stack: "Stack") -> None:
        self._stack = stack

    async def connect(self, address: AgentAddress, timeout_s: float) -> AgentClient:
        self._stack.host.faults.hit("connect")
        client = Client(self._stack.agent.connection())
        agent = AgentClient(client, request_timeout_s=self._stack.request_timeout_s)
        self._stack.clients.append(client)
        await agent.check(timeout_s)
        self._stack.on_connected()
        return agent


class FakeFollower:
    """`names` has the spans that have ended, in that order, each with the name of its parent."""

    def __init__(self) -> None:
        self.heard: dict[int, Span] = {}

    def ended(self, number: int, span: Span) -> None:
        assert number not in self.heard, f"{span.name} ends once"
        self.heard[number] = span

    def context(self, number: int) -> str:
        return f"00-{number}"

    def names(self) -> list[tuple[str, str]]:
        return [
            (span.name, self.heard[span.parent].name if span.parent != NO_PARENT else "")
            for span in self.heard.values()
        ]


class Stack:
    """A pod and all its fakes."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.host = FakeHost(faults)
        self.agent = FakeAgent()
        self.capacity = CAPACITY
        self.document: Mapping[str, Any] = DOCUMENT
        self.annotated: Mapping[str, str] = {}
        """As in `Config`."""
        self.block_hotplug = True
        self.find_devices = no_devices
        self.ask_placement: AskPlacement = no_plugin
        self.machine: Machine | ShimError = machine(ONE_NODE)
        self.networks = FakeNetworks()
        self.clients: list[Client] = []
        self.request_timeout_s = 5.0
        self.on_connected: Callable[[], object] = lambda: None
        """Called when an agent has been reached, before the pod has it."""
        self.publisher = FakePublisher()
        self.traced_to: list[str] = []
        self.spans = FakeFollower()
        self.records: list[FakeRecords] = []
        self.hypervisors: list[FakeVm] = []
        self.open_records: Callable[[str], Coroutine[Any, Any, Records]] = self._records
        environment = self._environment()
        self.pod = Pod(
            identity=Identity(
                namespace="default",
                sandbox_id="c1",
                containerd_ttrpc_address="",
                bundle=HostPath(f"{BUNDLES}/c1"),
                debug=True,
            ),
            environment=environment,
        )
        self.sandbox_calls = SandboxCalls(pod=self.pod, environment=environment, options=None)

    def _environment(self) -> Environment:
        return Environment(
            host=self.host,
            load_config=self._load_config,
            host_facts=self._host_facts,
            capacity=self._capacity,
            hypervisor_factory=self._hypervisor,
            connector_factory=lambda config: FakeConnector(self),
            network_connector=self.networks,
            publisher=self.publisher,
            open_records=lambda sandbox_id: self.open_records(sandbox_id),
            clock_ns=lambda: 1_700_000_000_000_000_000,
            new_uuid=lambda: "11111111-2222-3333-4444-555555555555",
            read_machine=self._read_machine,
            find_devices=lambda question: self.find_devices(question),
            give_up_after_start=lambda _plan: None,
            ask_placement=lambda path, need: self.ask_placement(path, need),
            serve_monitor=self.host.serve_monitor,
            export_trace=self._export_trace,
        )

    async def _load_config(self, options: object, annotations: object) -> Any:
        self.host.faults.hit("config")
        await asyncio.sleep(0)
        config = build_config(Source(path="test.toml", directory="/", document=self.document))
        return replace(config, annotated=self.annotated)

    def _export_trace(self, trace: Trace, endpoint: str, sandbox_id: str, annotations: Mapping[str, str]) -> None:
        self.traced_to.append(endpoint)
        trace.follow(self.spans)

    async def _host_facts(self) -> HostFacts:
        return FACTS

    async def _read_machine(self) -> Machine:
        if isinstance(self.machine, ShimError):
            raise self.machine
        return self.machine

    async def _capacity(self, question: CapacityQuestion) -> CapacityFacts:
        self.host.faults.hit("capacity")
        return self.capacity

    def _hypervisor(self, ledger: Any, _name: str) -> FakeVm:
        self.hypervisors.append(FakeVm(self.host.faults.hit, ledger, block_hotplug=self.block_hotplug))
        return self.hypervisors[-1]

    async def _records(self, sandbox_id: str) -> FakeRecords:
        self.records.append(FakeRecords(self.host))
        return self.records[-1]

    def request(self, name: str, args: list[str], stdio: Stdio = NO_STDIO, **spec: Any) -> CreateTask:
        bundle = f"{BUNDLES}/{name}"
        self.host.write_spec(bundle, args, **spec)
        return CreateTask(container_id=ContainerId(name), bundle=HostPath(bundle), rootfs=(), stdio=stdio, options=None)

    def with_rootfs(self, request: CreateTask, *mounts: RootfsMount) -> CreateTask:
        return replace(request, rootfs=mounts)

    async def create(self, name: str, args: list[str], stdio: Stdio = NO_STDIO, **spec: Any) -> ContainerId:
        await self.pod.create(self.request(name, args, stdio, **spec))
        return ContainerId(name)

    async def run(self, name: str, args: list[str], stdio: Stdio = NO_STDIO, **spec: Any) -> ContainerId:
        container_id = await self.create(name, args, stdio, **spec)
        await self.pod.start(container_id, None)
        return container_id

    async def exec(
        self, container_id: ContainerId, exec_id: str, args: list[str], stdio: Stdio = NO_STDIO, **process: Any
    ) -> ExecId:
        await self.pod.exec(
            ExecTask(
                container_id=container_id,
                exec_id=ExecId(exec_id),
                stdio=stdio,
                process={"args": args, "cwd": "/", "terminal": stdio.terminal, **process},
            )
        )
        return ExecId(exec_id)

    async def end(self, container_id: ContainerId) -> ExitStatus:
        """The container's init was killed and has ended."""
        await self.pod.kill(container_id, None, 9, False)
        return await self.pod.wait(container_id, None)

    async def delete_last(self, container_id: ContainerId) -> None:
        """The pod's last container is deleted, and the shim has left the cgroups, which follows the reply."""
        await self.pod.delete(container_id, None)
        await until(lambda: self.pod.is_empty)

    def left(self) -> dict[str, object]:
        """Leftovers on the host, state files and running VMs included; empty when all is clean."""
        found = self.host.left()
        # The caller makes a bundle and removes it with all that is in it.
        found["images"] = [path for path in self.host.images if not path.startswith(f"{BUNDLES}/")]
        found["ledger"] = [entry for records in self.records for entry in records.ledger.entries]
        found["vms"] = [vm for vm in self.hypervisors if vm.is_running]
        found["state"] = [records for records in self.records if not records.removed]
        return {name: value for name, value in found.items() if value}

    async def close(self) -> None:
        await self.pod.close()
        await self.agent.close()
        for client in self.clients:
            client.close()
        await asyncio.sleep(0)


async def give_up_while_it_plugs(stack: Stack, name: str, **spec: Any) -> None:
    """The creation of container `name` was cancelled while its device was plugged, and was undone."""
    vm = stack.hypervisors[0]
    plugging = asyncio.Event()
    plug = vm.plug

    async def slow(given: Device) -> GuestLocation:
        plugging.set()
        await asyncio.sleep(5)
        return await plug(given)

    vm.plug = slow  # type: ignore[method-assign]
    creation = asyncio.create_task(stack.create(name, ["sleep"], **spec))
    await plugging.wait()
    with pytest.raises(NotFound):
        await stack.pod.delete(ContainerId(name), None)
    with pytest.raises(ShimError):
        await creation


async def outcomes(*calls: Coroutine[Any, Any, object]) -> list[object]:
    """The result of each call, or the type of its error. A coroutine that was never awaited has failed the test."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found = [type(result) if isinstance(result, BaseException) else result for result in results]
    del results  # their tracebacks keep the frames of the calls
    await asyncio.sleep(0)
    gc.collect()
    return found


async def until(holds: Callable[[], object], *, every_s: float = 0.001) -> None:
    """`holds` is true; the test's time limit ends a wait for what never happens.

    Each look takes time, the pauses between them none: a long wait is better looked at seldom.
    """
    while not holds():  # noqa: ASYNC110 - the fakes have no event for everything a test may ask
        await asyncio.sleep(every_s)
