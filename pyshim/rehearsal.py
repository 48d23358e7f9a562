"""A pod's life played in the zygote before it forks anything: what runs for the first time writes to its own code.

Python counts and specializes functions as they run, remembers attributes by type, and fills its caches. Done after a
fork, each such write makes a page private to one shim; done before, all forks share the result. So the play walks the
common paths of a shim often enough for that to settle. Its host, VM and guest are made up: nothing outside a temporary
directory is touched, no process is started, and no thread and no event loop remains.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from hypervisors.base import Capabilities, Hypervisor, VmConfig, VmExit, VmExitKind
from hypervisors.qemu.cmdline import fd_table, qemu_argv
from hypervisors.qemu.qmp import Monitor
from pyshim import log as shim_log
from pyshim.agent.client import AgentClient
from pyshim.bootstrap.wire import encode
from pyshim.config.load import load_config
from pyshim.config.sources import SHIPPED_PATH
from pyshim.host.capacity import probe_capacity
from pyshim.host.linux import LinuxHost
from pyshim.host.probe import probe_host
from pyshim.host.processes.children import Children
from pyshim.host.trees import remove_tree
from pyshim.host.uuids import new_uuid
from pyshim.model.agent_address import AgentAddress, UnixAddress
from pyshim.model.capacity import CapacityFacts, CapacityQuestion
from pyshim.model.config import Config
from pyshim.model.host_facts import CgroupMode, HostFacts
from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.mounts import HostMount
from pyshim.model.task import Identity, RuntimeOptions
from pyshim.sandbox.environment import Environment
from pyshim.sandbox.pod import Pod
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore
from pyshim.task.publisher import EventPublisher
from pyshim.task.service import TaskService
from pyshim.ttrpc import Client, Server
from pyshim.ttrpc.handlers import CallContext, UnaryHandler

PLAYS = 12
_TASK = "containerd.task.v2.Task"
_PROCESS_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Process"
_WITHIN_S = 300.0
"""Ends a hang; nobody waits for a play, and it takes its time while a node comes up and everything runs at once."""


def rehearse(directory: str, plays: int = PLAYS, mark: Callable[[], object] = lambda: None) -> None:
    """The play has been given `plays` times, its files in a new directory below `directory`.

    `mark` is called before each Create and after each Start. Raises whatever went wrong in it; then too nothing of it
    is left.
    """
    stage = f"{directory}/rehearsal-{os.getpid()}"
    os.mkdir(stage, 0o700)
    read_end, write_end = os.pipe()
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        os.set_blocking(write_end, False)  # nobody reads: what does not fit is lost
        shim_log.set_up(debug=False, fd=write_end, fields={"sandbox": "rehearsal"})
        asyncio.run(_play(stage, plays, mark))
    finally:
        remove_tree(stage)
        logging.captureWarnings(False)
        root.setLevel(before[0])
        root.handlers[:] = before[1]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


async def _play(directory: str, plays: int, mark: Callable[[], object]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        # Without cgroups: those of this machine are not for playing.
        facts = replace(await asyncio.to_thread(probe_host), cgroup_mode=CgroupMode.NONE)
        for _ in range(plays):
            await _Stage(directory, facts, mark).play()


class _Stage:
    """One shim with everything around it, for one play."""

    def __init__(self, directory: str, facts: HostFacts, mark: Callable[[], object]) -> None:
        self._directory = directory
        self._facts = facts
        self._mark = mark
        self._host = _Host(children=Children())
        self._guest = _Guest()
        self._shim = ShimRecord(pid=os.getpid(), start_ticks=1, socket="unix:///rehearsal", namespace="rehearsal")

    async def play(self) -> None:
        publisher = EventPublisher(address=f"{self._directory}/nobody", namespace="rehearsal")
        pod = Pod(
            identity=Identity(
                namespace="rehearsal",
                sandbox_id="rehearsal",
                containerd_address="",
                containerd_ttrpc_address="",
                publish_binary="",
                bundle=HostPath(self._directory),
                debug=False,
            ),
            environment=self._environment(publisher),
        )
        service = TaskService(sandboxes=pod, cgroup_mode=self._facts.cgroup_mode)
        server = Server(services=service.services())
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(server.serve_connection(theirs))
        ours.setblocking(False)
        containerd = await Client.connect_socket(ours)
        try:
            await self._calls(containerd)
        finally:
            containerd.close()
            await server.shutdown(1)
            await serving
            await pod.close()
            await self._guest.end()
        await _talk_qmp()

    async def _calls(self, containerd: Client) -> None:
        async def call(method: str, *fields: tuple[int, str | bytes | int]) -> bytes:
            return await containerd.call(_TASK, method, encode((1, "rehearsal"), *fields), timeout_s=_WITHIN_S)

        streams = [f"{self._directory}/{name}" for name in ("in", "out", "err")]
        for path in streams:
            os.mkfifo(path)
        try:
            self._write_spec()
            self._mark()
            await call("Create", (2, self._directory), (5, streams[0]), (6, streams[1]), (7, streams[2]))
            waiting = asyncio.create_task(call("Wait"))
            await call("Start")
            self._mark()
            for method in ("State", "Connect", "Pids", "State", "Stats"):
                await call(method)
            process = encode((1, _PROCESS_TYPE), (2, json.dumps(self._process()).encode()))
            for name in ("one", "two"):
                await call("Exec", (2, name), (5, streams[1]), (6, streams[2]), (7, process))
                for method in ("State", "Start", "Wait", "Delete"):
                    await call(method, (2, name))
            await call("Kill", (3, 15))
            await waiting
            await call("Delete")
            await call("Shutdown")
        finally:
            for path in streams:
                os.unlink(path)

    def _write_spec(self) -> None:
        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec"]},
            {"destination": "/etc/hosts", "type": "bind", "source": "/dev/null", "options": ["rbind", "rw"]},
        ]
        spec = {
            "ociVersion": "1.1.0",
            "process": self._process(),
            "root": {"path": "rootfs"},
            "hostname": "rehearsal",
            "mounts": mounts,
            "annotations": {"io.kubernetes.cri.container-name": "rehearsal"},
            "linux": {
                "resources": {"cpu": {"shares": 2}, "memory": {"limit": 1 << 28}},
                "namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount")],
            },
        }
        with open(f"{self._directory}/config.json", "w") as file:
            json.dump(spec, file)

    @staticmethod
    def _process() -> dict[str, object]:
        return {"args": ["sleep"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}, "terminal": False}

    def _environment(self, publisher: EventPublisher) -> Environment:
        async def config(options: RuntimeOptions | None, annotations: Mapping[str, str]) -> Config:
            asked = RuntimeOptions(config_path=SHIPPED_PATH, config_body=b"")
            return await asyncio.to_thread(load_config, asked, annotations, {})

        async def facts() -> HostFacts:
            return self._facts

        async def capacity(question: CapacityQuestion) -> CapacityFacts:
            found = await asyncio.to_thread(probe_capacity, question, cgroup_mode=self._facts.cgroup_mode)
            return CapacityFacts(
                available_mib=1 << 20, swap_free_mib=0, backing=None, cgroup=found.cgroup
            )  # this is not about how full the node is

        async def records(sandbox_id: SandboxId) -> SandboxRecords:
            store = StateStore(root=f"{self._directory}/state")
            return SandboxRecords(store=store, sandbox_id=sandbox_id, shim=self._shim, release=self._host.release)

        return Environment(
            host=cast(Any, self._host),
            load_config=config,
            host_facts=facts,
            capacity=capacity,
            hypervisor_factory=lambda ledger, _name: cast(Hypervisor, _Vm(ledger)),
            connector_factory=lambda config: cast(Any, self._guest),
            network_connector=cast(Any, None),  # the pod has no network namespace
            publisher=publisher,
            open_records=records,
            clock_ns=time.time_ns,
            new_uuid=new_uuid,
            open_monitor=cast(Any, None),  # the pod has nothing to be asked about
        )


class _Host(LinuxHost):
    """This machine, but that nothing is changed on it."""

    async def make_directory(self, path: str, mode: int) -> None:
        return

    async def mount(self, mount: HostMount) -> None:
        return

    async def start_virtiofsd(self, plan: object, ledger: Ledger) -> Any:
        return _Virtiofsd()

    async def release(self, entry: LedgerEntry) -> None:
        return


class _Virtiofsd:
    pid = 1

    def __init__(self) -> None:
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        if not self._ended.done():
            self._ended.set_result("stopped")


class _Vm:
    """A VM that is only said to run."""

    def __init__(self, ledger: Ledger) -> None:
        self.pid = 1
        self.agent_address: AgentAddress = UnixAddress("/rehearsal")
        self._exit: asyncio.Future[VmExit] = asyncio.get_running_loop().create_future()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            share_fs=True,
            block_hotplug=True,
            network_hotplug=False,
            cpu_hotplug=False,
            memory_hotplug=False,
            pause=True,
        )

    async def create(self, config: VmConfig) -> None:
        qemu_argv(config, fd_table(config, guest_cid=0, image_bytes=1))

    async def start(self) -> None:
        return

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        return ()

    async def stop(self) -> None:
        if not self._exit.done():
            self._exit.set_result(VmExit(kind=VmExitKind.REQUESTED, reason="rehearsed"))

    async def wait(self) -> VmExit:
        return await asyncio.shield(self._exit)

    def console_tail(self) -> str:
        return ""

    def saved(self) -> Mapping[str, object]:
        return {"Type": "qemu", "UUID": "", "APISocket": "", "Pid": self.pid}


class _Guest:
    """An agent that says yes to everything: an empty message is a valid reply of nearly every call."""

    def __init__(self) -> None:
        self._signalled = asyncio.Event()
        self._server = Server(services={"grpc.AgentService": _Methods(self._answer), "grpc.Health": _Methods(_healthy)})
        self._serving: list[asyncio.Task[None]] = []

    async def connect(self, address: AgentAddress, timeout_s: float) -> AgentClient:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._serving.append(asyncio.create_task(self._server.serve_connection(theirs)))
        agent = AgentClient(await Client.connect_socket(ours), request_timeout_s=_WITHIN_S)
        await agent.check(timeout_s)
        return agent

    async def end(self) -> None:
        await self._server.shutdown(0)
        await asyncio.gather(*self._serving)

    async def _answer(self, method: str, payload: bytes) -> bytes:
        if method == "SignalProcess":
            self._signalled.set()
        elif method == "GetOOMEvent" or (method == "WaitProcess" and not payload.endswith((b"one", b"two"))):
            await self._signalled.wait()
        return b""


class _Methods(dict[str, UnaryHandler]):
    """Every name is a method."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def get(self, method: str, default: Any = None) -> Any:
        async def handle(payload: bytes, _: CallContext) -> bytes:
            return bytes(await self._answer(method, payload))

        return UnaryHandler(handle, cancel_on_timeout=True)


async def _healthy(method: str, payload: bytes) -> bytes:
    return encode((1, 1))


async def _talk_qmp() -> None:
    """One conversation with a QEMU that agrees to everything."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    greeting = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": []}}
    writer.write(json.dumps(greeting).encode() + b"\r\n")

    async def agree() -> None:
        # A client's requests have no line ends; each is sent alone, once the one before it is answered.
        while request := await reader.read(1 << 16):
            writer.write(json.dumps({"return": {}, "id": json.loads(request).get("id")}).encode() + b"\r\n")
            event = {"event": "RESUME", "data": {}, "timestamp": {"seconds": 1, "microseconds": 1}}
            writer.write(json.dumps(event).encode() + b"\r\n")

    answering = asyncio.create_task(agree())
    monitor = Monitor(name="rehearsal", on_event=lambda event: None)
    try:
        await monitor.connect(ours, _WITHIN_S)
        for _ in range(4):
            await monitor.cont()
    finally:
        await monitor.close()
        writer.close()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
