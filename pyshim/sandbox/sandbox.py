"""One VM and all in it, from the first host directory to nothing left.

`start` carries out the plan; every step pushes its undo, which `stop` runs, or `start` itself when it fails. After
`start`, watchers wait for the end nobody asked for: the VMM's exit, virtiofsd's, the agent connection's, and, of a VM
elsewhere, the agent's silence. Whichever comes first gives the reason, and `on_lost` is called once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from hypervisors.base import Hypervisor
from pyshim.model.errors import DeadlineExceeded, ShimError, Unavailable
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import ContainerId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.trace import span, step, traced
from pyshim.plan.sandbox import SandboxPlan
from pyshim.sandbox.attachments import Attachments
from pyshim.sandbox.cgroups import SandboxCgroups
from pyshim.sandbox.claimed_devices import container_devices
from pyshim.sandbox.device_access import with_device_access
from pyshim.sandbox.direct_volumes import DirectVolumes, OpenMonitor
from pyshim.sandbox.networking import SandboxNetwork
from pyshim.sandbox.passed_devices import FindDevices
from pyshim.sandbox.resizing import Resizer
from pyshim.sandbox.seams import (
    Agent,
    AgentConnector,
    Host,
    HypervisorFactory,
    NetworkConnector,
    Records,
    Virtiofsd,
)
from pyshim.sandbox.tasks import TaskOwner, cancel_all, to_the_end, together
from pyshim.sandbox.undo import Undo

log = logging.getLogger("pyshim.sandbox")
T = TypeVar("T")

DESTROY_TIMEOUT_S = 3.0
LOST_REASON_WAIT_S = 0.5
OOM_PAUSE_S = 0.1
"""A guest may report as many OOM kills as it likes; containerd is told ten of them a second."""


class Sandbox:
    def __init__(
        self,
        *,
        plan: SandboxPlan,
        host: Host,
        hypervisor_factory: HypervisorFactory,
        connector: AgentConnector,
        network_connector: NetworkConnector,
        records: Records,
        tasks: TaskOwner,
        on_lost: Callable[[str], None],
        on_oom: Callable[[str], None],
        host_facts: HostFacts,
        on_change: Callable[[], None],
        find_devices: FindDevices,
        open_monitor: OpenMonitor,
    ) -> None:
        self.plan = plan
        self._host = host
        self._connector = connector
        self._ledger = records.ledger
        self._tasks = tasks
        self._on_lost = on_lost
        self._on_oom = on_oom
        hypervisor = hypervisor_factory(self._ledger, plan.config.hypervisor_name)
        self.cgroups = SandboxCgroups(
            plan=plan,
            host=host.cgroups(plan.cgroups.mode),
            records=records,
            hypervisor=hypervisor,
            on_change=on_change,
        )
        self.hypervisor: Hypervisor = with_device_access(hypervisor, self.cgroups.allow)
        self.resizer = Resizer(
            plan=plan,
            host=host_facts,
            hypervisor=self.hypervisor,
            agent=lambda: self.agent,
            tasks=tasks,
            on_change=on_change,
            fit=self.cgroups.fit,
        )
        self.attachments = self._make_attachments(open_monitor)
        self.devices = container_devices(plan=plan, hypervisor=self.hypervisor, tasks=tasks, find=find_devices)
        self._agent: Agent | None = None
        self._virtiofsd: Virtiofsd | None = None
        self._undo = Undo(f"sandbox '{plan.sandbox_id}'")
        self.network = self._make_network(network_connector, on_change)
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._stop_lock = asyncio.Lock()
        self._pid = 0
        self.failure = ""
        self.is_stopped = False
        """`stop` has done its work."""
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _make_network(self, connector: NetworkConnector, on_change: Callable[[], None]) -> SandboxNetwork:
        return SandboxNetwork(
            plan=self.plan,
            connector=connector,
            host=self._host,
            hypervisor=self.hypervisor,
            ledger=self._ledger,
            tasks=self._tasks,
            undo=self._undo,
            on_change=on_change,
        )

    def _make_attachments(self, open_monitor: OpenMonitor) -> Attachments:
        direct = DirectVolumes(
            sandbox_id=self.plan.sandbox_id,
            host=self._host,
            agent=lambda: self.agent,
            attachments=lambda: self.attachments,
            open_monitor=open_monitor,
            hold=self._acquire,
            at_end=lambda close: self._undo.push(close),
        )
        return Attachments(
            hypervisor=self.hypervisor,
            tasks=self._tasks,
            host=self._host,
            hold=self._acquire,
            announce=direct.announce,
        )

    @property
    def virtiofsd_pid(self) -> int:
        """virtiofsd's pid, also after it has gone; 0 before it runs."""
        return self._virtiofsd.pid if self._virtiofsd is not None else 0

    @property
    def pid(self) -> int:
        """The VMM's pid, also after it has gone: containerd keeps using the number it was given.

        A VM that is not on this host has none; it is told the shim's then, as by Kata.
        """
        return self._pid

    @property
    def agent(self) -> Agent:
        """The guest's agent. Raises Unavailable with the reason once the sandbox is lost or stopped."""
        if self._agent is None or self._stopping:
            raise Unavailable(f"use sandbox '{self.plan.sandbox_id}': {self.failure or 'its vm is not running'}")
        return self._agent

    async def start(self) -> None:
        """The VM runs and its agent has the sandbox; nothing is left on the host when this raises."""
        _log_sizing(self.plan)
        try:
            self._agent = await self._start()
        except BaseException:
            await self._undo.run()
            raise
        self._watch(self._agent)

    async def _start(self) -> Agent:
        self._undo.push(self.cgroups.leave)
        # The kernel takes its time to move a process. The share needs none; whatever does is started after the move.
        await together(step("enter cgroups", self.cgroups.enter()), self._make_share())
        await together(self.network.connect(), self._start_virtiofsd())
        await self._boot()
        agent = await self._or_lost(self._reach_guest())
        self.network.serve(agent)
        return agent

    def has_container(self, container_id: ContainerId) -> None:
        """The pod has this container now."""
        self.network.has_container(container_id)

    async def loss(self, otherwise: str) -> str:
        """Why the sandbox was lost, if that shows up soon; `otherwise` when it does not."""
        if not self.failure and not self._stopping:
            await asyncio.wait([self._lost], timeout=2 * LOST_REASON_WAIT_S)
        return self.failure or otherwise

    async def stop(self, agent_gone: bool = False) -> None:
        """The VM is gone and nothing of the sandbox is left on the host but its state.

        `agent_gone`: the caller has lost the agent, so why is to be known before the VM ends by our own hand.

        Idempotent, callers share it. What could not be undone is logged and stays in the ledger.
        """
        if agent_gone:
            await self.loss("")
        self._stopping = True
        await to_the_end(self._stop())

    async def _stop(self) -> None:
        async with self._stop_lock:
            await cancel_all(*self._watchers)
            self._watchers.clear()
            if self._agent is not None and not self.failure and not self.is_stopped:
                await self._ask_guest_to_end(self._agent)
            await self._undo.run()
            self.is_stopped = True

    @traced("make share")
    async def _make_share(self) -> None:
        share = self.plan.share
        directories = (self.plan.vm.vm_dir, *((share.root,) if share.virtiofsd else ()))
        mounts = (*share.mounts, *share.bind_mounts)
        self._acquire(
            *(LedgerEntry(kind=ResourceKind.DIRECTORY, key=path) for path in directories),
            *(LedgerEntry(kind=ResourceKind.MOUNT, key=mount.target) for mount in mounts),
        )
        for path in directories:
            await self._host.make_directory(path, 0o700)
        if self.plan.initdata is not None:
            from pyshim.plan.initdata import disk_image  # few pods have any

            await self._host.write_bytes(self.plan.vm.initdata, disk_image(self.plan.initdata), 0o600)
        for mount in share.mounts:
            await self._host.make_directory(mount.target, 0o700)
            await self._host.mount(mount)
        for mount in share.bind_mounts:
            await self._host.mount(mount)

    async def _start_virtiofsd(self) -> None:
        if self.plan.share.virtiofsd is None:
            return
        with span("start virtiofsd"):
            self._virtiofsd = await self._host.start_virtiofsd(self.plan.share.virtiofsd, self._ledger)
        self._undo.push(self._virtiofsd.stop)

    async def _boot(self) -> None:
        self._undo.push_for(self.plan.vm.stop_timeout_s, self.hypervisor.stop)
        try:
            async with self.cgroups.birth_of_vmm():
                await together(
                    step("start vmm", self.hypervisor.create(self.network.vm)),
                    step("allow devices", self.cgroups.allow_nodes()),
                )
        finally:
            self.network.close_taps()
        self._pid = self.hypervisor.pid or self.cgroups.own_pid
        await self.cgroups.place(self.hypervisor.pid, self.virtiofsd_pid)
        await self.hypervisor.start()

    async def _reach_guest(self) -> Agent:
        agent = await self._reach_agent()
        await self._set_up_guest(agent)
        return agent

    @traced("wait for agent")
    async def _reach_agent(self) -> Agent:
        timeout_s = self.plan.config.agent.dial_timeout_s
        try:
            return await self._connect_agent(timeout_s)
        except DeadlineExceeded as exc:
            tail = self.hypervisor.console_tail()
            raise DeadlineExceeded(f"{exc}; last console lines: {tail or '(none)'}") from exc

    async def _connect_agent(self, timeout_s: float) -> Agent:
        """Its undo is pushed here: a caller cancelled at the very end of the connect would never see the agent."""
        agent = await self._connector.connect(self.hypervisor.agent_address, timeout_s)
        self._undo.push(agent.close)
        return agent

    @traced("set up guest")
    async def _set_up_guest(self, agent: Agent) -> None:
        if policy := self.plan.config.agent.policy:
            await agent.set_policy(policy)  # first of all: the agent judges every other call by it
        await self.network.set_up(agent)
        await agent.create_sandbox(self.plan.guest)

    async def _or_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or Unavailable with the reason as soon as the VM or virtiofsd dies under it."""
        wanted = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self._first_loss())
        try:
            await asyncio.wait([wanted, lost], return_when=asyncio.FIRST_COMPLETED)
            if wanted.done() and wanted.exception() is None:
                return wanted.result()
            if not lost.done():  # a failed call is often the first sign of a dying vm, whose reason explains more
                await asyncio.wait([lost], timeout=LOST_REASON_WAIT_S)
            if lost.done():
                cause = wanted.exception() if wanted.done() else None
                raise Unavailable(f"start vm '{self.plan.sandbox_id}': {lost.result()}") from cause
            return wanted.result()
        finally:
            await cancel_all(wanted, lost)

    async def _first_loss(self) -> str:
        ends = [asyncio.ensure_future(self._vm_end())]
        if self._virtiofsd is not None:
            ends.append(asyncio.ensure_future(self._virtiofsd_end()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not ends[0].done():  # virtiofsd ends with its VM and is mostly noticed first: the VM's reason explains
                await asyncio.wait(ends[:1], timeout=LOST_REASON_WAIT_S)
            return next(end for end in ends if end.done()).result()
        finally:
            await cancel_all(*ends)

    async def _vm_end(self) -> str:
        return await self.cgroups.explain(await self.hypervisor.wait())

    async def _virtiofsd_end(self) -> str:
        assert self._virtiofsd is not None, "virtiofsd starts before the vm"
        return await self.cgroups.explain_virtiofsd(await self._virtiofsd.wait())

    def _watch(self, agent: Agent) -> None:
        sandbox_id = self.plan.sandbox_id
        ends = [("vm", self._vm_end), ("agent", agent.gone)]
        if self._virtiofsd is not None:
            ends.append(("virtiofsd", self._virtiofsd_end))
        if not self.hypervisor.capabilities().tells_end:
            from pyshim.sandbox.health import unanswered  # few VMs are remote

            ends.append(("health", partial(unanswered, agent)))
        for name, end in ends:
            self._watchers.append(self._tasks.supervise(f"watch/{name}/{sandbox_id}", self._watch_end(name, end)))
        self._watchers.append(self._tasks.supervise(f"watch/oom/{sandbox_id}", self._watch_oom(agent)))

    async def _watch_end(self, name: str, end: Callable[[], Awaitable[str]]) -> None:
        reason = await end()
        if name != "vm":
            reason = await self._better_reason(name, reason)
        self._lose(name, reason)

    def give_up(self, reason: str) -> None:
        """The sandbox is lost, as if its VM had ended: nothing can be had of the guest any more. Idempotent."""
        self._lose("kill", reason)

    def _lose(self, watcher: str, reason: str) -> None:
        if self._stopping or self.failure:
            return
        self.failure = reason
        self._lost.set_result(None)
        log.error("sandbox lost", extra={"sandbox": self.plan.sandbox_id, "watcher": watcher, "error": reason})
        self._on_lost(reason)

    async def _better_reason(self, name: str, reason: str) -> str:
        """What else is lost is mostly the echo of a dead VM: the VMM's own words explain more, if they come soon."""
        try:
            async with asyncio.timeout(LOST_REASON_WAIT_S):
                return await self._vm_end()
        except TimeoutError:
            return f"the agent's connection ended: {reason}" if name == "agent" else reason

    async def _watch_oom(self, agent: Agent) -> None:
        while True:
            try:
                container_id = await agent.next_oom_event()
            except ShimError as exc:
                log.debug("no more oom events", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})
                return
            self._on_oom(container_id)
            await asyncio.sleep(OOM_PAUSE_S)

    async def _ask_guest_to_end(self, agent: Agent) -> None:
        """The agent has flushed and unmounted what it can; a guest that does not answer in time is simply ended."""
        try:
            async with asyncio.timeout(DESTROY_TIMEOUT_S):
                await agent.destroy_sandbox()
        except (ShimError, TimeoutError) as exc:
            log.debug("destroy sandbox", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})

    def _acquire(self, *entries: LedgerEntry) -> None:
        self._undo.acquire(self._ledger, *entries)


def _log_sizing(plan: SandboxPlan) -> None:
    sizing = plan.sizing
    explained = {"vcpus": sizing.vcpus.explain("vCPU"), "memory": sizing.memory_mib.explain("MiB")}
    log.info("sizing", extra={"sandbox": plan.sandbox_id, **explained})
    for warning in sizing.warnings:
        log.warning("capacity", extra={"sandbox": plan.sandbox_id, "problem": warning})
