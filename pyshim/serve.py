"""The daemon: builds the real adapters, passes them in, serves the socket until nothing is left to serve.

`serve` is entered with the listening socket and an identity, by exec or by a fork of a process that has imported this
module already: nothing here happens at import time.
"""

import asyncio
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hypervisors.base import Hypervisor
from hypervisors.qemu.vm import QemuVm
from pyshim import log as shim_log
from pyshim.agent.connect import Connector
from pyshim.bootstrap.address import unlink
from pyshim.config.load import load_config
from pyshim.debug import dump_on_signal
from pyshim.host import tsc
from pyshim.host.capacity import probe_capacity
from pyshim.host.linux import LinuxHost
from pyshim.host.network.connector import HostNetworkConnector
from pyshim.host.probe import probe_host
from pyshim.host.processes.children import Children, start_ticks_of
from pyshim.host.processes.identity import ProcessRef, is_alive, our_pid_namespace
from pyshim.host.threads import to_the_end
from pyshim.host.uuids import new_uuid
from pyshim.later import load_while
from pyshim.model.capacity import CapacityFacts, CapacityQuestion
from pyshim.model.config import Config
from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import Ledger
from pyshim.model.task import Identity, RuntimeOptions
from pyshim.plan.network import changed_plan, network_plan
from pyshim.sandbox.environment import Environment
from pyshim.sandbox.pod import Pod
from pyshim.sandbox.seams import Monitor, VolumeRpc
from pyshim.sandbox.tasks import TaskOwner
from pyshim.state.json_fields import StateDamaged
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import REGISTER, StateStore
from pyshim.task.publisher import EventPublisher
from pyshim.task.service import TaskService
from pyshim.ttrpc import Server

if TYPE_CHECKING:
    from pyshim.failpoints.wrapping import Faults
    from pyshim.host.memory.baseline import Baseline

log = logging.getLogger("pyshim.serve")

REPLY_GRACE_S = 5.0
FLUSH_TIMEOUT_S = 3.0
REMAINS_TIMEOUT_S = 10.0
"""For undoing what a dead shim left of a sandbox that is now made anew."""
UNUSED_AFTER_S = 600.0
"""A daemon that containerd never asked for anything (it died in between) ends itself after this long."""


def serve(listening_fd: int, identity: Identity, *, forked: bool, baseline: "Baseline | None" = None) -> int:
    """The exit code, once every task is gone and containerd has been told: 0.

    `forked`: by the zygote, for the log; `baseline` is what such a process can go back to.
    """
    shim_log.set_up(debug=identity.debug, fields={"sandbox": identity.sandbox_id, "namespace": identity.namespace})
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    listener = socket.socket(fileno=listening_fd)
    os.set_inheritable(listening_fd, False)
    asyncio.run(_Daemon(identity, forked=forked, baseline=baseline).run(listener))
    return 0


class _Daemon:
    def __init__(self, identity: Identity, *, forked: bool, baseline: "Baseline | None" = None) -> None:
        self._identity = identity
        self._made_by = "fork" if forked else "exec"
        self._baseline = baseline
        self._children = Children()
        self._facts: HostFacts | None = None
        self._tsc: tsc.Reading | None = None

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        socket_path = listener.getsockname()
        # Read from below: first nobody can find the socket, then all is ended, the last replies and events leave, then
        # the process. Each step is taken whatever the one before it met.
        async with AsyncExitStack() as end:
            # Until there is something to serve; a daemon that fails before leaves no socket to be waited at.
            unserved = end.enter_context(ExitStack())
            unserved.callback(unlink, socket_path)
            end.push_async_callback(self._children.end_all)
            tasks = TaskOwner()
            end.push_async_callback(tasks.close)
            publisher = EventPublisher(
                address=self._identity.containerd_ttrpc_address, namespace=self._identity.namespace
            )
            end.push_async_callback(publisher.flush, FLUSH_TIMEOUT_S)
            pod = Pod(identity=self._identity, environment=self._environment(publisher, socket_path))
            service = TaskService(sandboxes=pod, cgroup_mode=(await self._host_facts()).cgroup_mode)
            if self._baseline is not None:
                from pyshim.zygote.rest import Rest

                rest = Rest(loop, self._baseline)
                end.callback(rest.close)
                service.after_call = rest.called
            server = Server(services=service.services(), authorize=check_peer)
            end.push_async_callback(server.shutdown, REPLY_GRACE_S)
            end.push_async_callback(pod.close)
            end.callback(unlink, socket_path)
            unserved.pop_all()
            stop = service.finished
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            dump_on_signal(loop, service.open_calls)
            loop.call_later(UNUSED_AFTER_S, lambda: None if pod.was_used else stop.set())
            for task in (
                tasks.supervise("publisher", publisher.run()),
                tasks.supervise("accept", server.serve(listener)),
            ):
                task.add_done_callback(lambda _: stop.set())  # a shim nobody can reach must not stay
            tasks.supervise("load the rest", load_while(service.idle))
            log.info("shim started", extra={"pid": os.getpid(), "made_by": self._made_by})
            await stop.wait()
        log.info("shim ended", extra={"pid": os.getpid()})

    def _environment(self, publisher: EventPublisher, socket_path: str) -> Environment:
        faults = faults_of(os.environ)
        children = self._children if faults is None else faults.children(self._children)

        def hypervisor(ledger: Ledger, name: str) -> Hypervisor:
            if name == "remote":
                from hypervisors.remote.vm import RemoteVm  # most nodes have none

                return RemoteVm(ledger=ledger)
            return QemuVm(children=children, ledger=ledger)

        shim = ShimRecord(
            pid=os.getpid(),
            start_ticks=start_ticks_of(os.getpid()),
            socket=f"unix://{socket_path}",
            namespace=self._identity.namespace,
            pid_namespace=our_pid_namespace(),
        )

        async def records(sandbox_id: SandboxId) -> SandboxRecords:
            store = StateStore(register=REGISTER)
            refuse_living_namesake(store, sandbox_id, shim)
            if store.knows(sandbox_id):  # hardly ever: no thread for nothing
                await to_the_end(clear_remains, store, sandbox_id)
            return SandboxRecords(store=store, sandbox_id=sandbox_id, shim=shim, release=host.release)

        async def config(options: RuntimeOptions | None, annotations: Mapping[str, str]) -> Config:
            loaded = await asyncio.to_thread(load_config, options, annotations, dict(os.environ))
            if loaded.runtime.enable_debug:
                shim_log.set_debug()
            return loaded

        async def find_devices(question: DeviceQuestion) -> PodDevices:
            if question.is_empty:
                return PodDevices()
            from pyshim.devices.finder import DeviceFinder

            return await DeviceFinder(children).find(question)

        host = LinuxHost(children=children)
        host.expect_moves()  # containerd calls Create as soon as it can connect
        environment = Environment(
            host=host,
            load_config=config,
            host_facts=self._host_facts,
            capacity=self._capacity,
            hypervisor_factory=hypervisor,
            connector_factory=lambda config: agent_connector(config, faults),
            network_connector=HostNetworkConnector(
                children=children, plan=network_plan, replan=changed_plan, owner=self._identity.sandbox_id
            ),
            publisher=publisher,
            open_records=records,
            clock_ns=time.time_ns,
            new_uuid=new_uuid,
            find_devices=find_devices,
            open_monitor=open_monitor,
            expect_sandbox=host.expect_moves,
        )
        return environment if faults is None else faults.environment(environment)

    async def _host_facts(self) -> HostFacts:
        if self._facts is None:
            self._facts = await asyncio.to_thread(probe_host)
            if not self._facts.kvm_usable:
                with suppress(OSError):
                    self._tsc = tsc.reading()
        elif self._tsc is not None:
            # Whoever asks later plans a VM by it. Most have long passed the few milliseconds that the rate takes.
            first, self._tsc = self._tsc, None
            with suppress(OSError):
                self._facts = replace(self._facts, tsc_khz=await tsc.khz_since(first))
        return self._facts

    async def _capacity(self, question: CapacityQuestion) -> CapacityFacts:
        facts = await self._host_facts()
        return await asyncio.to_thread(probe_capacity, question, cgroup_mode=facts.cgroup_mode)


def agent_connector(config: Config, faults: "Faults | None") -> Connector:
    """Who reaches the agents of sandboxes with this configuration."""
    return Connector(
        request_timeout_s=config.agent.request_timeout_s,
        set_up_timeout_s=config.set_up_timeout_s,
        wrap=faults.wire if faults else None,
    )


async def open_monitor(path: str, volumes: VolumeRpc) -> Monitor:
    """The sandbox's monitor socket, for the few pods that have anything to be asked there."""
    from pyshim.task.monitor_socket import MonitorSocket

    monitor = MonitorSocket(path, volumes)
    try:
        await monitor.open()
    except OSError as error:
        raise FailedPrecondition(f"listen at '{path}': {error.strerror}") from error
    return monitor


def faults_of(environ: Mapping[str, str]) -> "Faults | None":
    """The faults a test asked for; in production None, and nothing of them is even imported."""
    if not environ.get("PYSHIM_FAILPOINTS"):
        return None
    from pyshim.failpoints.wrapping import Faults

    return Faults(environ)


def refuse_living_namesake(store: StateStore, sandbox_id: SandboxId, ours: ShimRecord) -> None:
    """No other living shim has a sandbox of this id. Raises FailedPrecondition naming it; NotOurState, StateTooNew.

    Ids are unique in a namespace of containerd only, and Kata's directories are named by the id alone: a second sandbox
    would mount over the first one's share, and its end would take the first one's directories along.
    """
    try:
        theirs = store.load(sandbox_id).shim
    except (NotFound, StateDamaged):
        entered = store.entered(sandbox_id)
        if entered is None:
            return
        theirs = entered
    owner = ProcessRef(theirs.pid, theirs.start_ticks)
    if owner != ProcessRef(ours.pid, ours.start_ticks) and is_alive(owner):
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: the shim of pid {theirs.pid} in namespace {theirs.namespace!r} has one"
        )


def clear_remains(store: StateStore, sandbox_id: SandboxId) -> None:
    """What a dead shim left of a sandbox of this id is undone, before its only record is overwritten.

    Blocking. Raises FailedPrecondition naming what cannot be undone: a new sandbox on top of it would hide it for ever.
    """
    if not store.knows(sandbox_id):
        return
    from pyshim.bootstrap.leftovers import undo_remains

    errors = undo_remains(store, sandbox_id, deadline=time.monotonic() + REMAINS_TIMEOUT_S)
    if errors:
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: an earlier shim left what cannot be undone: {'; '.join(errors)} "
            f"(hint: 'pyshim cleanup {sandbox_id}' tries again)"
        )


def check_peer(sock: socket.socket) -> None:
    """The peer runs as our own user and group, as containerd does. Raises PermissionError otherwise."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if (uid, gid) != (os.geteuid(), os.getegid()):
        raise PermissionError(f"accept connection of pid {pid}: uid {uid}, gid {gid} is not ours")
