"""The life of a pod of two containers with a network, as containerd and the kubelet drive it, on a fake machine."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hypervisors.base import Hypervisor
from pyshim.agent.client import AgentClient
from pyshim.agent.connect import Connector
from pyshim.concurrency.deadlines import CHANGE_S, within_s
from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model import host_facts as topology
from pyshim.model.errors import ShimError
from pyshim.model.guest import AgentAddress
from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, HostFacts
from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.ledger import Ledger
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns
from pyshim.model.seams import MonitorRpc
from pyshim.model.task import CreateTask, ExecTask, Identity, RootfsMount, Stdio
from pyshim.model.units import MIB
from pyshim.node.nri.description import machine
from pyshim.pod.environment import Environment
from pyshim.pod.pod import Pod
from pyshim.pod.sandbox_calls import SandboxCalls
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.ttrpc import Client
from tests.failpoints.points import Failpoints, Fault
from tests.failpoints.wrapping import AgentWire, with_points
from tests.fakes.absent import no_devices, no_export, no_plugin
from tests.fakes.agent import FakeAgent
from tests.fakes.deadlines import deadlines_of
from tests.fakes.host import FakeMonitor, FakePublisher
from tests.fakes.machine import Machine, MachineConnector, MachineHost, MachineStore, MachineVm
from tests.fakes.machines import ONE_NODE
from tests.unit.pod.conftest import CAPACITY, DOCUMENT, FACTS

SANDBOX = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "pod"}
CONTAINER = {**SANDBOX, "io.kubernetes.cri.container-type": "container"}
POD, APP, SIDE = ContainerId("pod"), ContainerId("app"), ContainerId("side")
EXEC = ExecId("e1")
PIPES = Stdio(stdin="/in", stdout="/out", stderr="/err", terminal=False)
NONE = Stdio(stdin="", stdout="", stderr="", terminal=False)
HOOKS = {"prestart": [{"path": "/hooks/before"}], "poststop": [{"path": "/hooks/after"}]}
DISK = {"path": "/dev/loop7", "type": "b", "major": 7, "minor": 7}
PATIENCE_S = 500.0
"""Virtual seconds after which a call counts as hung: more than any deadline, for a Create several of them."""
EXIT_S = 40.0
"""Virtual seconds for an exit before the driver goes on: more than the shim takes after a KILL."""


async def _serve_monitor(
    path: str, metrics_path: str, pod: MonitorRpc, *, debug: bool
) -> Callable[[], Awaitable[None]]:
    return FakeMonitor(path, pod).close


async def _read_machine() -> topology.Machine:
    return machine(ONE_NODE)


Step = tuple[str, Callable[[], Awaitable[object]]]


class Hung(AssertionError):
    """A call got no answer."""


@deadlines_of(Connector)
class _Connector:
    def __init__(self, life: "PodLife", timeout_s: float) -> None:
        self._life = life
        self._timeout_s = timeout_s

    async def connect(self, address: AgentAddress, timeout_s: float) -> AgentClient:
        client = AgentWire(self._life.faults, Client(self._life.agent.connection()))
        self._life.clients.append(client)
        agent = AgentClient(client, request_timeout_s=self._timeout_s)
        try:
            await agent.check(timeout_s)
        except BaseException:
            await agent.close()
            raise
        return agent


class PodLife:
    """One shim, its machine, its guest, and its driver. `errors` are the driver's, in order."""

    def __init__(
        self,
        *faults: Fault,
        agent: FakeAgent | None = None,
        store: Callable[[Machine], MachineStore] = MachineStore,
        vm: Callable[[Ledger, Machine], Hypervisor] = MachineVm,
        clock_ns: Callable[[], int] = lambda: 1_700_000_000_000_000_000,
        template: str | None = None,
    ) -> None:
        """`store` makes what keeps the state, `vm` the hypervisor; `clock_ns` is the time of day.

        With `template` the VM continues from that directory.
        """
        self.machine = Machine()
        self.at_kill: Machine | None = None
        self.killed = asyncio.Event()
        self.faults = Failpoints(faults, kill=self._kill)
        self.agent = agent or FakeAgent()
        self.clients: list[AgentWire] = []
        self.publisher = FakePublisher()
        self.errors: list[str] = []
        self.late_errors: list[str] = []
        """Errors of the clean-up."""
        self.host = MachineHost(self.machine)
        self.host.template = template
        document = {
            "factory": {"enable_template": template is not None},
            "hypervisor": {"qemu": {**DOCUMENT["hypervisor"]["qemu"], "default_memory": 512}},
            "runtime": {"static_sandbox_resource_mgmt": False},
        }
        config = build_config(Source(path="test.toml", directory="/", document=document))
        shim = ShimRecord(pid=1, start_ticks=1, socket="unix:///s", namespace="k8s.io")

        @within_s(CHANGE_S, "load configuration")
        async def load(_options: object, _annotations: object) -> Any:
            return config

        @within_s(CHANGE_S, "probe host")
        async def facts() -> HostFacts:
            return FACTS

        @within_s(CHANGE_S, "measure room on host")
        async def capacity(_question: CapacityQuestion) -> CapacityFacts:
            return CAPACITY

        @within_s(CHANGE_S, "open state of sandbox")
        async def records(sandbox_id: SandboxId) -> SandboxRecords:
            made: Any = store(self.machine)
            return SandboxRecords(store=made, sandbox_id=sandbox_id, shim=shim, undo=self.host.undo)

        environment = Environment(
            host=self.host,
            load_config=load,
            host_facts=facts,
            capacity=capacity,
            hypervisor_factory=lambda ledger, _name: vm(ledger, self.machine),
            connector_factory=lambda config: _Connector(self, config.agent.request_timeout_s),
            network_connector=MachineConnector(self.machine),
            publisher=self.publisher,
            open_records=records,
            clock_ns=clock_ns,
            new_uuid=lambda: "11111111-2222-3333-4444-555555555555",
            serve_monitor=_serve_monitor,
            read_machine=_read_machine,
            find_devices=no_devices,
            export_trace=no_export,
            give_up_after_start=lambda _plan: None,
            ask_placement=no_plugin,
        )
        identity = Identity(
            namespace="k8s.io",
            sandbox_id="pod",
            containerd_ttrpc_address="",
            bundle=HostPath("/bundles/pod"),
            debug=True,
        )
        environment = with_points(self.faults, environment)
        self.pod = Pod(identity=identity, environment=environment)
        self.sandbox_calls = SandboxCalls(pod=self.pod, environment=environment, options=None)

    def _kill(self) -> None:
        """The machine of this moment is the one that the shim's end leaves."""
        if self.at_kill is None:
            self.at_kill = self.machine.copy()
            self.killed.set()

    # ---- the calls

    async def start(self) -> None:
        """The pod is up, without containers."""
        await self._take("create pod", "start pod")

    async def make_app(self) -> None:
        """A container with an exec runs."""
        await self._take("create app", "start app", "exec", "start exec")

    async def live_on(self) -> None:
        """Every call of a pod's life is tried, whatever the ones before it met."""
        for step in self._steps():
            await self._tried(*step)

    async def one_round(self) -> None:
        """A container was created, started, used, killed and deleted."""
        await self._take("create app", "start app", "exec", "start exec", "wait exec", "delete exec", "update app")
        await self.pod.kill(APP, None, 9, True)
        await self.pod.wait(APP, None)
        await self.pod.delete(APP, None)

    async def _take(self, *names: str) -> None:
        steps = dict(self._steps())
        for name in names:
            await steps[name]()

    async def live(self) -> None:
        """The pod comes up, works, and loses a container; the first call that fails ends it."""
        for step in self._steps():
            if not await self._tried(*step):
                return

    def _steps(self) -> list[Step]:
        return [*self._pod_steps(), *self._container_steps()]

    def _pod_steps(self) -> list[Step]:
        network = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/pod"}]}}
        return [
            ("create pod", lambda: self.pod.create(self._request(POD, SANDBOX, NONE, **network))),
            ("start pod", lambda: self.pod.start(POD, None)),
        ]

    def _container_steps(self) -> list[Step]:
        pod = self.pod
        limits = {"resources": {"cpu": {"quota": 200_000, "period": 100_000}, "memory": {"limit": 300 * MIB}}}
        more = {"memory": {"limit": 500 * MIB}}
        return [
            (
                "create app",
                lambda: pod.create(
                    self._request(APP, CONTAINER, PIPES, linux={**limits, "devices": [DISK]}, hooks=HOOKS)
                ),
            ),
            ("start app", lambda: pod.start(APP, None)),
            (
                "exec",
                lambda: pod.exec(ExecTask(container_id=APP, exec_id=EXEC, stdio=PIPES, process=_process("echo", "x"))),
            ),
            ("start exec", lambda: pod.start(APP, EXEC)),
            ("wait exec", lambda: self._exit(APP, EXEC)),
            ("delete exec", lambda: pod.delete(APP, EXEC)),
            ("update app", lambda: pod.update(APP, more)),
            ("stats app", lambda: pod.stats(APP)),
            ("pause app", lambda: pod.pause(APP)),
            ("resume app", lambda: pod.resume(APP)),
            ("create side", lambda: pod.create(self._request(SIDE, CONTAINER, NONE))),
            ("start side", lambda: pod.start(SIDE, None)),
            ("close stdin", lambda: pod.close_io(APP, None)),
            ("kill side", lambda: pod.kill(SIDE, None, 9, False)),
            ("wait side", lambda: self._exit(SIDE, None)),
            ("delete side", lambda: pod.delete(SIDE, None)),
        ]

    async def _exit(self, container: ContainerId, exec_id: ExecId | None) -> None:
        """As the kubelet waits: for so long, then it goes on."""
        try:
            async with asyncio.timeout(EXIT_S):
                await self.pod.wait(container, exec_id)
        except TimeoutError:
            self.errors.append(f"no exit of {exec_id or container} came")

    async def _tried(self, name: str, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await call()
        except ShimError as exc:
            self.errors.append(str(exc))
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a fault that cancels the caller
                task.uncancel()
            self.errors.append(f"{name}: cancelled")
            return False
        except TimeoutError as exc:
            raise Hung(f"{name}: no answer within {PATIENCE_S:g} s") from exc
        return True

    async def clean_up(self) -> None:
        """containerd's and the kubelet's calls to end a pod, whatever its state; then the shim ends."""
        errors = self.errors
        self.errors = []
        await self.end()
        self.late_errors, self.errors = self.errors, errors
        self.machine.replay()

    async def end(self) -> None:
        """The calls that end a pod: kill, wait and delete of each container, then shutdown."""
        for container in (SIDE, APP, POD):
            if await self._tried("kill", lambda id=container: self.pod.kill(id, None, 9, True)):
                await self._tried("wait", lambda id=container: self._exit(id, None))
        for container in (SIDE, APP, POD):
            for _ in range(2):
                if await self._tried("delete", lambda id=container: self.pod.delete(id, None)):
                    break
        await self._tried("shutdown", self.pod.close)

    async def drop(self) -> None:
        """The kernel has closed what the dead shim held, and its guest is gone."""
        for client in self.clients:
            client.close()
        await self.agent.close()
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.pod.close()
        await self.agent.close()
        await asyncio.sleep(0)

    def _request(self, name: ContainerId, annotations: Mapping[str, str], stdio: Stdio, **spec: Any) -> CreateTask:
        bundle = f"/bundles/{name}"
        document = {
            "ociVersion": "1.0.2",
            "process": _process("sleep"),
            "root": {"path": "rootfs"},
            "annotations": annotations,
            **spec,
        }
        self.host.files[f"{bundle}/config.json"] = json.dumps(document).encode()
        rootfs = (RootfsMount(type="overlay", source="overlay", target="", options=("lowerdir=/a:/b",)),)
        return CreateTask(container_id=name, bundle=HostPath(bundle), rootfs=rootfs, stdio=stdio, options=None)


class ServedLife(PodLife):
    """A pod of the Sandbox API, without a pause container."""

    def _pod_steps(self) -> list[Step]:
        config = PodConfig(
            name="web",
            namespace="default",
            uid="u1",
            hostname="web-0",
            dns=PodDns(servers=("10.0.0.10",), searches=(), options=()),
            annotations={},
            cgroup_parent="/kubepods/podu1",
            sysctls={},
            resources=None,
            host_namespaces=frozenset(),
        )
        request = CreateSandbox(
            sandbox_id=SandboxId(POD),
            bundle=HostPath(f"/bundles/{POD}"),
            netns_path="/run/netns/pod",
            annotations={},
            pod=config,
        )
        return [
            ("create pod", lambda: self.sandbox_calls.create(request)),
            ("start pod", lambda: self.sandbox_calls.start(SandboxId(POD))),
        ]

    async def end(self) -> None:
        """The calls that end a pod: kill, wait and delete of each container, then stop and shutdown of the sandbox."""
        for container in (SIDE, APP):
            if await self._tried("kill", lambda id=container: self.pod.kill(id, None, 9, True)):
                await self._tried("wait", lambda id=container: self._exit(id, None))
            await self._tried("delete", lambda id=container: self.pod.delete(id, None))
        await self._tried("stop", lambda: self.sandbox_calls.stop(SandboxId(POD)))
        await self._tried("shutdown", lambda: self.sandbox_calls.shutdown(SandboxId(POD)))


def _process(*args: str) -> dict[str, Any]:
    return {"args": list(args), "cwd": "/"}
