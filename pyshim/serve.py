"""The daemon: builds the real adapters, passes them in, serves the socket until nothing is left to serve.

`serve` is entered with the listening socket and an identity, by exec or by a fork of a process that has imported this
module already: nothing here happens at import time.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hypervisors.base import Hypervisor
from hypervisors.qemu.cmdline import can_hotplug
from hypervisors.qemu.vm import QemuVm
from hypervisors.remote.vm import RemoteHypervisor
from pyshim import log as shim_log
from pyshim.agent.client import AgentClient, Wire
from pyshim.agent.connect import Connector
from pyshim.cleanup.leftovers import clear_remains, refuse_running_namesake
from pyshim.cleanup.undo import undo_entry
from pyshim.concurrency.deadlines import CHANGE_S, within_s
from pyshim.concurrency.tasks import TaskOwner
from pyshim.config.load import ConfigCache, load_config
from pyshim.debug import dump_on_signal, objects, stacks
from pyshim.host.fds import keep_spare_descriptors
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.children import Children
from pyshim.host.processes.confinement import DEVICE_LIST_CALL, START_CALLS, deny_calls, give_up_capabilities
from pyshim.host.threads import in_thread, keep_one_in_reserve, thread_to_the_end
from pyshim.host.writers import code_paths, writable_by_others
from pyshim.model.config import Config
from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, CgroupMode, HostFacts, Machine
from pyshim.model.ids import ContainerId, SandboxId
from pyshim.model.ledger import Ledger
from pyshim.model.observation import AgentCalls, Durations, Trace
from pyshim.model.places import REGISTER
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import MonitorRpc
from pyshim.model.task import Identity, RemoteVmLost, RuntimeOptions
from pyshim.model.vm import LocalVm
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.socket import MonitorSocket
from pyshim.pod.environment import Environment
from pyshim.pod.pod import Pod
from pyshim.pod.sandbox_calls import SandboxCalls
from pyshim.resources.devices.host.finder import DeviceFinder
from pyshim.resources.linux import LinuxHost
from pyshim.resources.machine import read_machine
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from pyshim.resources.placement_call import ask_for_placement
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.host import probe_capacity
from pyshim.start.address import forget, unlink
from pyshim.state.records import SandboxRecords, own_record
from pyshim.state.store import StateStore
from pyshim.task.calls import Calls
from pyshim.task.publisher import EventPublisher
from pyshim.task.sandbox_service import SandboxService
from pyshim.task.service import TaskService
from pyshim.ttrpc import Client, PeerCredentials, Server

if TYPE_CHECKING:
    from pyshim.tracing.exporter import SpanExporter

log = logging.getLogger(__name__)

_TEMPLATE_MAKER = "pyshim.template_maker"
"""Imported in a child only: it composes what a shim does without."""
REPLY_GRACE_S = 5.0
FLUSH_TIMEOUT_S = 3.0
LAST_REPLY_S = 1.0
"""Seconds for containerd to close its connection after ShutdownSandbox."""
IDLE_S = 60.0
"""Seconds without a call after which a daemon with neither container nor VM ends. containerd calls as soon as `start`
has answered. When it has died meanwhile, has given up a Create, or has forgotten the sandbox after a restart, nothing
else would end the daemon."""
LEFT_S = 5.0
"""The same after the last caller has closed its connection. A containerd that is restarted connects again only to shims
whose containers it knows, and calls `delete` for a shim that has ended."""


class Faults(Protocol):
    """Failpoints of tests around the pod's adapters (tests/failpoints)."""

    def children(self, children: Children) -> Children: ...

    def wire(self, client: Client) -> Wire: ...

    def environment(self, environment: Environment) -> Environment: ...


def serve(
    listening_fd: int,
    identity: Identity,
    *,
    made_by: str,
    reason: str = "",
    faults: Faults | None = None,
    config_cache: ConfigCache | None = None,
) -> int:
    """The exit code, once every task is gone and containerd has its events: 0.

    The log gets `made_by`, "fork" or "exec", and the `reason` why `start` executed this process. `config_cache` has the
    configurations that a zygote has read.
    """
    shim_log.set_up(debug=identity.debug, fields={"sandbox": identity.sandbox_id, "namespace": identity.namespace})
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    listener = socket.socket(fileno=listening_fd)
    os.set_inheritable(listening_fd, False)
    daemon = _Daemon(identity, made_by=made_by, reason=reason, faults=faults, config_cache=config_cache)
    asyncio.run(daemon.run(listener))
    return 0


def _warn_of_writers(event: str, paths: Iterable[str]) -> None:
    """The log names each path whose content users other than root can change."""
    if exposed := writable_by_others(paths):
        log.warning(event, extra={"places": ", ".join(exposed)})


def _booted(config: Config) -> tuple[str, ...]:
    """The configuration's file, and the programs and images that it names."""
    machine = config.hypervisor
    named = (
        *(machine.path, machine.kernel, machine.image, machine.initrd, machine.firmware),
        *(machine.virtio_fs_daemon, machine.vhost_user_vsock_daemon),
        *(image["path"] for image in machine.guest_extension_images),
    )
    return tuple(path for path in (config.source, *named) if os.path.isabs(path))


def _remove_socket(path: str) -> None:
    unlink(path)
    forget(path)


class _Lifetime:
    """Sets `over` when the daemon is not needed any more: idle for IDLE_S, left by its callers, or shut down."""

    def __init__(self, *, pod: Pod, calls: Calls, over: asyncio.Event) -> None:
        self._pod = pod
        self._calls = calls
        self._over = over
        self._server: Server | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._was_left = False
        """All callers have closed their connections at least once."""

    def begin(self, server: Server) -> None:
        self._server = server
        self._look_after(IDLE_S)

    def end_after_reply(self) -> None:
        """containerd may close its connection first: a client that sees its end may miss the last reply."""
        self._is_ending = True
        asyncio.get_running_loop().call_later(LAST_REPLY_S, self._over.set)

    def connections_ended(self) -> None:
        if self._is_ending:
            self._over.set()
        else:
            self._was_left = True
            self._look_after(self._patience_s())

    def _patience_s(self) -> float:
        """Seconds without a call after which a shim without containers ends."""
        is_left = self._was_left and self._server is not None and not self._server.connections
        return LEFT_S if is_left and self._pod.life is None else IDLE_S

    def _look_after(self, delay_s: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_later(delay_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._pod.is_empty:
            return
        if self._pod.life is not None and self._server is not None and self._server.connections:
            return  # containerd may be pulling an image before StartSandbox; it ends the sandbox, too
        if (left_s := self._patience_s() - self._calls.idle_s()) > 0:
            self._look_after(left_s)
            return
        log.info("neither container nor call", extra={"pid": os.getpid()})
        self._over.set()


class _Daemon:
    def __init__(
        self,
        identity: Identity,
        *,
        made_by: str,
        reason: str = "",
        faults: Faults | None = None,
        config_cache: ConfigCache | None = None,
    ) -> None:
        self._identity = identity
        self._faults = faults
        self._config_cache = config_cache
        self._origin = {"made_by": made_by} | ({"reason": reason} if reason else {})
        self._children = Children()
        self._facts: HostFacts | None = None
        self._durations = Durations()
        self._calls = Calls(self._durations)
        self._agent_calls = AgentCalls(time.monotonic)
        self._exporter: SpanExporter | None = None
        self._threads = ThreadPoolExecutor()
        """For `asyncio.to_thread`."""
        self._is_confined = False

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        keep_one_in_reserve()
        with suppress(OSError):
            keep_spare_descriptors()
        socket_path = listener.getsockname()
        # The end, in the reverse order of this code: the socket is unlinked, the pod ends, the last replies and events
        # are sent, children are killed. Each step runs even if one before it has failed.
        async with AsyncExitStack() as end:
            # A daemon that fails before it serves leaves no socket, at which clients would wait.
            unserved = end.enter_context(ExitStack())
            unserved.callback(_remove_socket, socket_path)
            end.push_async_callback(self._children.end_all)
            end.push_async_callback(self._end_export)
            tasks = TaskOwner()
            end.push_async_callback(tasks.close)
            publisher = EventPublisher(
                address=self._identity.containerd_ttrpc_address, namespace=self._identity.namespace
            )
            end.push_async_callback(publisher.flush, FLUSH_TIMEOUT_S)
            environment = self._environment(publisher, socket_path)
            pod = Pod(identity=self._identity, environment=environment)
            mode = (await self._host_facts()).cgroup_mode
            service = TaskService(tasks=pod, cgroup_mode=mode, calls=self._calls)
            over = service.finished
            lifetime = _Lifetime(pod=pod, calls=self._calls, over=over)
            sandbox_service = SandboxService(
                sandbox=SandboxCalls(pod=pod, environment=environment, options=self._identity.options),
                cgroup_mode=mode,
                calls=self._calls,
                on_shutdown=lifetime.end_after_reply,
            )
            services = {**service.services(), **sandbox_service.services()}
            server = Server(services=services, authorize=check_peer, when_alone=lifetime.connections_ended)
            lifetime.begin(server)
            end.push_async_callback(server.shutdown, REPLY_GRACE_S)
            end.push_async_callback(pod.close)
            end.callback(_remove_socket, socket_path)
            unserved.pop_all()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, over.set)
            dump_on_signal(loop, self._calls.open_calls)
            for task in (
                tasks.supervise("publisher", publisher.run()),
                tasks.supervise("accept", server.serve(listener)),
            ):
                task.add_done_callback(lambda _: over.set())  # no client could end the shim any more
            log.info("shim started", extra={"pid": os.getpid(), **self._origin})
            _warn_of_writers("others can change the shim's code", code_paths())
            await over.wait()
        log.info("shim ended", extra={"pid": os.getpid()})

    def _environment(self, publisher: EventPublisher, socket_path: str) -> Environment:
        faults = self._faults
        children = self._children if faults is None else faults.children(self._children)
        host = LinuxHost(children=children, undo_entry=undo_entry, template_maker=_TEMPLATE_MAKER)

        def lost_vm(vm_id: str) -> None:
            publisher.publish(RemoteVmLost(container_id=ContainerId(vm_id)))

        def hypervisor(ledger: Ledger, name: str) -> Hypervisor:
            if name == "remote":
                return RemoteHypervisor(ledger=ledger, on_lost=lost_vm)
            return QemuVm(children=children, ledger=ledger)

        shim = own_record(socket=f"unix://{socket_path}", namespace=self._identity.namespace)

        @within_s(CHANGE_S, "open state of sandbox")
        async def records(sandbox_id: SandboxId) -> SandboxRecords:
            store = StateStore(register=REGISTER)
            refuse_running_namesake(store, sandbox_id, shim)
            if store.has_record(sandbox_id):  # rare, so no thread otherwise
                await thread_to_the_end(clear_remains, store, sandbox_id)
            return SandboxRecords(store=store, sandbox_id=sandbox_id, shim=shim, undo=host.undo)

        environment = Environment(
            host=host,
            load_config=self._load_config,
            host_facts=self._host_facts,
            capacity=self._capacity,
            hypervisor_factory=hypervisor,
            connector_factory=lambda config: agent_connector(config, faults, self._agent_calls),
            network_connector=HostNetworkConnector(children=children, owner=self._identity.sandbox_id),
            publisher=publisher,
            open_records=records,
            clock_ns=time.time_ns,
            new_uuid=_random_uuid,
            find_devices=partial(_find_devices, children),
            serve_monitor=self._serve_monitor,
            export_trace=self._export_trace,
            ask_placement=ask_for_placement,
            read_machine=_read_machine,
            give_up_after_start=self._give_up_after_start,
        )
        return environment if faults is None else faults.environment(environment)

    @within_s(CHANGE_S, "load configuration")
    async def _load_config(self, options: RuntimeOptions | None, annotations: Mapping[str, str]) -> Config:
        loaded = await in_thread(load_config, options, annotations, dict(os.environ), self._config_cache)
        _warn_of_writers("others can change what this pod is made from", _booted(loaded))
        if loaded.runtime.enable_debug:
            shim_log.set_debug()
        self._confine(loaded)
        return loaded

    async def _serve_monitor(
        self, path: str, metrics_path: str, pod: MonitorRpc, *, debug: bool
    ) -> Callable[[], Awaitable[None]]:
        bundle = self._identity.bundle
        address_file = f"{bundle}/monitor_address" if bundle else ""
        texts = {"stacks": lambda: stacks(self._calls.open_calls()), "objects": objects} if debug else {}
        answers = ShimAnswers(pod, calls=self._durations, agent_calls=self._agent_calls, debug=texts)
        async with AsyncExitStack() as opened:
            with os_errors(f"listen at '{path}' and '{metrics_path}'"):
                os.makedirs(os.path.dirname(metrics_path), mode=0o750, exist_ok=True)
                for monitor in (
                    # Mode 0: root needs CAP_DAC_OVERRIDE. A pod that reads the states as root, as that of the NRI
                    # plugin, has no capabilities, and so sees this socket, which takes orders, but cannot connect.
                    MonitorSocket(path, answers.answer, mode=0, address_file=address_file),
                    MonitorSocket(metrics_path, answers.answer_question, mode=0o660),
                ):
                    await monitor.open()
                    opened.push_async_callback(monitor.close)
            return opened.pop_all().aclose

    def _export_trace(self, trace: Trace, endpoint: str, sandbox_id: SandboxId, annotations: Mapping[str, str]) -> None:
        if self._exporter is None:  # a second attempt at the sandbox is in the same trace
            self._exporter = exporter_of(self._children, trace, endpoint, sandbox_id, annotations)

    def _confine(self, config: Config) -> None:
        """The shim has no capabilities and calls that it does not need, before it runs a hook or another child.

        Capabilities belong to threads, so those of the pool are replaced. Raises FailedPrecondition.
        """
        if self._is_confined or not config.runtime.confine_shim:
            return
        with os_errors("confine shim", hint="confine_shim = false"):
            if not config.hypervisor.privileged_vmm:  # it keeps the capabilities of root
                give_up_capabilities()
            if not deny_calls():
                log.warning("shim has no filter of system calls", extra={"error": "libseccomp.so.2 is missing"})
        former, self._threads = self._threads, ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self._threads)
        former.shutdown(wait=False)
        keep_one_in_reserve()
        self._is_confined = True

    def _give_up_after_start(self, plan: SandboxPlan) -> None:
        """Calls that only the start of a VM, or a disk that is plugged later, needs are denied."""
        if not self._is_confined:
            return
        changes_list = plan.cgroups.mode is CgroupMode.V2 and isinstance(plan.vm, LocalVm) and can_hotplug(plan.vm)
        with os_errors("confine shim", hint="confine_shim = false"):
            deny_calls(START_CALLS if changes_list else (*START_CALLS, DEVICE_LIST_CALL))

    async def _end_export(self) -> None:
        if self._exporter is not None:
            await self._exporter.close()

    @within_s(CHANGE_S, "probe host")
    async def _host_facts(self) -> HostFacts:
        if self._facts is None:
            self._facts = await in_thread(probe_host)
        return self._facts

    @within_s(CHANGE_S, "measure room on host")
    async def _capacity(self, question: CapacityQuestion) -> CapacityFacts:
        facts = await self._host_facts()
        return await in_thread(probe_capacity, question, cgroup_mode=facts.cgroup_mode)


@within_s(CHANGE_S, "find devices")
async def _find_devices(children: Children, question: DeviceQuestion) -> PodDevices:
    if question.is_empty:
        return PodDevices()
    return await DeviceFinder(children).find(question)


@within_s(CHANGE_S, "read machine")
async def _read_machine() -> Machine:
    return await in_thread(read_machine)


def _random_uuid() -> str:
    """A random UUID from the kernel. The module `uuid` would import `platform` as well."""
    with open("/proc/sys/kernel/random/uuid", encoding="utf-8") as file:
        return file.read().strip()


def agent_connector(config: Config, faults: Faults | None, calls: AgentCalls) -> Connector:
    """The connector to agents of sandboxes with this configuration."""
    client_of = partial(
        AgentClient,
        request_timeout_s=config.agent.request_timeout_s,
        set_up_timeout_s=config.set_up_timeout_s,
        durations=calls,
    )
    return Connector(client_of if faults is None else lambda connection: client_of(faults.wire(connection)))


def exporter_of(
    children: Children, trace: Trace, endpoint: str, sandbox_id: SandboxId, annotations: Mapping[str, str]
) -> "SpanExporter | None":
    """The exporter of the spans of `trace`; None, with a warning, if it cannot be made: the pod runs without it.

    `pyshim.tracing` is imported here, since most shims trace nothing.
    """
    try:
        from pyshim.tracing.exporter import export

        return export(children, trace, endpoint=endpoint, sandbox_id=sandbox_id, annotations=annotations)
    except Exception as error:  # such as a module of a replaced installation: the pod starts anyway
        log.warning("spans are not exported", extra={"error": f"{type(error).__name__}: {error}"})
        return None


def check_peer(sock: socket.socket) -> None:
    """The peer runs as our own user and group, as containerd does. Raises PermissionError otherwise."""
    peer = PeerCredentials.of(sock)
    assert peer is not None, "the listener is a unix socket"
    if (peer.uid, peer.gid) != (os.geteuid(), os.getegid()):
        raise PermissionError(f"accept connection of pid {peer.pid}: uid {peer.uid}, gid {peer.gid} is not ours")
