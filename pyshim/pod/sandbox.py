"""A pod's sandbox: one VM and all that serves it, from the first directory on the host until nothing is left.

- `start` carries out the plan, stage by stage. Every step pushes its undo, which `end` runs, after a start that failed,
  too. `births.py` makes the VM.
- `watch` reports the end of the VMM, of virtiofsd or of the agent's connection, and failed health checks of a remote
  VM's agent. The reason is the VM's own, if that comes soon.
- `end` undoes VM, mounts and network. Then `vm_gone` is set, and Delete is answered. After that it undoes monitor and
  cgroups: the kernel takes 10 to 20 ms to move a process out of a cgroup.

`life.py` calls them, one at a time. A Create goes down `Pod.create`, `SandboxLife.open`, `Pod.make_sandbox`,
`Sandbox.start`, `Birth.start`, `PodVm.start`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from pyshim.concurrency.tasks import END_REASON_S, TaskOwner, cancel_all, together
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import ShimError
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import ContainerId, HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.observation import MONITOR_SOCKET, span, step, traced
from pyshim.model.places import METRICS_DIRECTORY, STATE_ROOT
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Agent, MonitorRpc, Records
from pyshim.pod.births import Birth, PodVm, births, find_template
from pyshim.pod.environment import Environment
from pyshim.pod.hooks import ContainerHooks
from pyshim.resources.cgroups.live import SandboxCgroups
from pyshim.resources.network.live import SandboxNetwork
from pyshim.resources.services import SandboxServices
from pyshim.resources.volumes.live import make_share

log = logging.getLogger(__name__)

DESTROY_TIMEOUT_S = 3.0
OOM_PAUSE_S = 0.1
"""Seconds between two reports to containerd, since a guest can report any number of OOM kills."""


class PodListener(Protocol):
    """The calls by which sandbox and containers report a change to their pod. None raises."""

    def changed(self) -> None: ...
    def init_started(self) -> None: ...
    def init_exited(self, container_id: ContainerId, *, agent_gone: bool) -> None: ...
    def container_met_oom(self, container_id: str) -> None: ...


class Sandbox:
    def __init__(
        self,
        *,
        plan: SandboxPlan,
        files: Mapping[str, HostPath],
        host_facts: HostFacts,
        environment: Environment,
        records: Records,
        tasks: TaskOwner,
        listener: PodListener,
    ) -> None:
        self.plan = plan
        self.files = files
        """As in `SandboxRequest`."""
        self._host = environment.host
        self._host_facts = host_facts
        self._env = environment
        self._listener = listener
        self._undo = Undo(f"sandbox '{plan.sandbox_id}'")
        self._undo_after_vm = Undo(f"monitor and cgroups of sandbox '{plan.sandbox_id}'")
        self.cgroups = SandboxCgroups(
            plan=plan, host=self._host.cgroups(plan.cgroups.mode), records=records, on_change=listener.changed
        )
        self.services = SandboxServices(
            plan=plan,
            host=self._host,
            ledger=records.ledger,
            undo=self._undo,
            tasks=tasks,
            on_change=listener.changed,
        )
        self.network = SandboxNetwork(self.services, environment.network_connector)
        self.vm = self._new_vm()
        """The VM of the last birth that was tried."""
        self._has_monitor = False
        self._watchers: list[asyncio.Task[None]] = []
        self.vm_gone = asyncio.Event()
        """Set by `end` once the undo of VM, mounts and network was tried; cleared by `begin_end`."""

    def _new_vm(self) -> PodVm:
        return PodVm(
            self.services,
            host_facts=self._host_facts,
            environment=self._env,
            cgroups=self.cgroups,
            network=self.network,
        )

    @property
    def agent(self) -> Agent:
        """As `PodVm.agent`."""
        return self.vm.agent

    @property
    def pid(self) -> int:
        """As `PodVm.pid`."""
        return self.vm.pid

    @property
    def is_left(self) -> bool:
        """Something of the sandbox is on the host, or may be."""
        return bool(self._undo or self._undo_after_vm)

    async def start(self, monitor: MonitorRpc, hooks: ContainerHooks) -> None:
        """The VM runs, its agent has the sandbox, and `monitor` is served. Call `end` also when this raises.

        The owner's `hooks` run before the network is read, since they may make it.
        """
        _log_sizing(self.plan)
        # Before the cgroups are entered: processes that a hook leaves behind, or that make a template, are not the
        # sandbox's.
        await self._run_hooks(hooks)
        template = await find_template(self.plan, self._host)
        self._undo_after_vm.push(self.cgroups.leave)
        # Programs that serve the guest must start in the sandbox's cgroups. The kernel takes 10 to 20 ms to move the
        # shim there: time to make the share, which needs no program, and the network, whose programs end here.
        enter_cgroups = step("enter cgroups", self.cgroups.enter())
        if self.plan.config.is_remote:  # no process of this host serves the guest
            await together(enter_cgroups, self._connect_and_make_vm(template, monitor))
        else:
            await together(enter_cgroups, self._connect())
            await self._make_vm(template, monitor)
        self._env.give_up_after_start(self.plan)
        self.vm.network.serve(self.vm.agent)

    async def _connect(self) -> None:
        await together(make_share(self.services), self.network.connect())

    async def _connect_and_make_vm(self, template: str, monitor: MonitorRpc) -> None:
        await self._connect()
        await self._make_vm(template, monitor)

    async def _make_vm(self, template: str, monitor: MonitorRpc) -> None:
        """The VM runs, and its agent has the sandbox. A birth that fails is undone before the next is tried."""
        for birth in births(self.plan, self.network.vm, template, self._env):
            before = len(self._undo)
            try:
                await self._try_birth(birth, monitor)
            except ShimError as exc:
                if not await birth.gives_way(exc):
                    raise
                if problem := await self._undo.run(down_to=before):
                    raise problem from exc
                self.vm = self._new_vm()
            else:
                return

    async def _try_birth(self, birth: Birth, monitor: MonitorRpc) -> None:
        vm = self.vm
        with birth.traced():
            await vm.start_virtiofsd()
            await birth.start(vm)
            await self._open_monitor(monitor)  # the guest boots meanwhile
            await vm.health.while_alive(birth.reach(vm))
        await vm.health.while_alive(self._set_up_guest(vm))
        vm.origin = birth.origin

    @traced("set up guest")
    async def _set_up_guest(self, vm: PodVm) -> None:
        if policy := self.plan.config.agent.policy:
            await vm.agent.set_policy(policy)  # first, since the agent applies it to every other call
        await vm.network.set_up(vm.agent)
        await vm.agent.create_sandbox(self.plan.guest)

    async def _run_hooks(self, hooks: ContainerHooks) -> None:
        path = self.plan.netns_path
        if path is not None and self.plan.new_netns:
            self.services.hold(LedgerEntry(kind=ResourceKind.NETNS, key=path))
            await self._host.make_netns(path)
        if path is None or not hooks.make_network:
            await hooks.before_create(0)
            return
        async with self._host.netns_member(path) as pid:
            await hooks.before_create(pid)

    async def _open_monitor(self, monitor: MonitorRpc) -> None:
        """The monitor sockets answer. A failure is logged, and the pod runs without them."""
        if self._has_monitor:  # from an earlier birth
            return
        self._has_monitor = True
        paths = (monitor_path(self.plan.sandbox_id), f"{METRICS_DIRECTORY}/{self.plan.sandbox_id}")
        entries = [LedgerEntry(kind=ResourceKind.SOCKET, key=path) for path in paths]
        self._undo_after_vm.acquire(self.services.ledger, *entries)
        try:
            close = await self._env.serve_monitor(*paths, monitor, debug=self.plan.config.runtime.enable_pprof)
        except ShimError as exc:
            log.warning("no monitor socket", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})
        else:
            self._undo_after_vm.push(close)

    async def loss_reason(self, otherwise: str) -> str:
        """The reason of a loss, if it is found soon; else `otherwise`. For a sandbox that runs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * END_REASON_S):
                return (await self.vm.health.first_end(self.agent))[1]
        return otherwise

    def begin_end(self, failure: str) -> None:
        """From now on `agent` raises Unavailable. Call `end` next."""
        self.vm.refuse(failure or "its vm is not running")
        self.vm_gone.clear()

    async def end(self, failure: str) -> None:
        """Every undo was tried. A failed one is logged and stays in the ledger; the next `end` tries it again.

        With a `failure`, the reason why the sandbox was lost, the guest is not asked to end.
        """
        agent, is_running = self.vm.take_agent(), bool(self._watchers)
        await cancel_all(*self._watchers)
        self._watchers.clear()
        try:
            with span("stop vm", saved=False):
                if agent is not None and is_running and not failure:
                    await self._ask_guest_to_end(agent)
                problem = await self._undo.run()
        finally:
            self.vm_gone.set()
        with span("leave cgroups", saved=False):
            await self._undo_after_vm.run()
        if problem is not None:
            await self._undo.run()  # what was busy may have ended by now

    def watch(self, lost: Callable[[str, str], None]) -> None:
        """A loss is reported to `lost`, with the part that was found gone and the reason; OOM kills to the listener."""
        agent = self.agent
        for name, work in (("end", self._watch_end(agent, lost)), ("oom", self._watch_oom(agent))):
            self._watchers.append(self.services.tasks.supervise(f"watch/{name}/{self.plan.sandbox_id}", work))

    async def _watch_end(self, agent: Agent, lost: Callable[[str, str], None]) -> None:
        lost(*await self.vm.health.first_end(agent))

    async def _watch_oom(self, agent: Agent) -> None:
        while True:
            try:
                container_id = await agent.next_oom_event()
            except ShimError as exc:
                log.debug("no more oom events", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})
                return
            self._listener.container_met_oom(container_id)
            await asyncio.sleep(OOM_PAUSE_S)

    async def _ask_guest_to_end(self, agent: Agent) -> None:
        """The agent has flushed and unmounted its file systems, unless it did not answer within DESTROY_TIMEOUT_S.

        kata-agent does that when a container is removed, not at the end of the sandbox.
        """
        try:
            async with asyncio.timeout(DESTROY_TIMEOUT_S):
                for container_id in self.vm.attachments.writers():
                    with suppress(ShimError):  # it was removed before, or the guest does not answer
                        await agent.remove_container(container_id, int(DESTROY_TIMEOUT_S))
                await agent.destroy_sandbox()
        except (ShimError, TimeoutError) as exc:
            log.debug("destroy sandbox", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})


def monitor_path(sandbox_id: str) -> str:
    """The socket's path, where Kata's programs look for it."""
    return f"{STATE_ROOT}/{sandbox_id}/{MONITOR_SOCKET}"


def _log_sizing(plan: SandboxPlan) -> None:
    sizing = plan.sizing
    explained = {"vcpus": sizing.vcpus.explain("vCPU"), "memory": sizing.memory_mib.explain("MiB")}
    log.info("sizing", extra={"sandbox": plan.sandbox_id, **explained})
    for warning in sizing.warnings:
        log.warning("capacity", extra={"sandbox": plan.sandbox_id, "problem": warning})
