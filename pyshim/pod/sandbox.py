"""One VM and all in it, from the first directory on the host until nothing is left.

- `start` carries out the plan. Every step pushes its undo, which `end` runs, after a start that failed, too.
- `watch` reports the end of the VMM, of virtiofsd or of the agent's connection, and failed health checks of a remote
  VM's agent. The reason is the VM's own, if that comes soon.
- `end` undoes VM, mounts and network. Then `vm_gone` is set, and Delete is answered. After that it undoes monitor and
  cgroups: the kernel takes 10 to 20 ms to move a process out of a cgroup.

`life.py` calls them, one at a time.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from pyshim.concurrency.tasks import TaskOwner, cancel_all, together
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import ContainerId, HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.observation import MONITOR_SOCKET, span, step, traced
from pyshim.model.places import METRICS_DIRECTORY, STATE_ROOT
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Agent, MonitorRpc, Records, Virtiofsd
from pyshim.model.vm import VmConfig
from pyshim.pod.environment import Environment
from pyshim.pod.health import END_REASON_S, SandboxHealth
from pyshim.pod.hooks import ContainerHooks
from pyshim.resources.cgroups.live import SandboxCgroups
from pyshim.resources.devices.live import container_devices
from pyshim.resources.devices.vm_devices import VmDevices
from pyshim.resources.network.live import SandboxNetwork
from pyshim.resources.services import SandboxServices
from pyshim.resources.sizing.live import Resizer
from pyshim.resources.sizing.swap import GuestSwap
from pyshim.resources.templates.plan import reason_to_boot
from pyshim.resources.volumes.attachments import Attachments
from pyshim.resources.volumes.live import make_share

log = logging.getLogger(__name__)

DESTROY_TIMEOUT_S = 3.0
BOOTED = "booted"
CONTINUED_AGENT_S = 60.0
"""Seconds for the agent of a continued guest to answer; then the template is discarded and the VM boots. More than a
crowded host needs: 6 s where 30 emulated VMs begin on two cores."""
SEED_BYTES = 512
"""Random bytes of the host for each guest that continues, as many as with Kata."""
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
        self._connector = environment.connector_factory(plan.config)
        self._tasks = tasks
        self._listener = listener
        self._undo = Undo(f"sandbox '{plan.sandbox_id}'")
        self._undo_after_vm = Undo(f"monitor and cgroups of sandbox '{plan.sandbox_id}'")
        self.hypervisor = environment.hypervisor_factory(records.ledger, plan.config.hypervisor_name)
        self.cgroups = SandboxCgroups(
            plan=plan,
            host=self._host.cgroups(plan.cgroups.mode),
            records=records,
            hypervisor=self.hypervisor,
            on_change=listener.changed,
        )
        self.resizer = Resizer(
            plan=plan,
            host=host_facts,
            hypervisor=self.hypervisor,
            agent=lambda: self.agent,
            tasks=tasks,
            on_change=listener.changed,
            fit=self.cgroups.fit,
        )
        services = SandboxServices(
            plan=plan,
            host=self._host,
            ledger=records.ledger,
            undo=self._undo,
            tasks=tasks,
            vm_devices=VmDevices(self.hypervisor, allow=self.cgroups.allow),
            on_change=listener.changed,
        )
        self.attachments = Attachments(services)
        self.swap = GuestSwap(services, attachments=self.attachments, agent=lambda: self.agent)
        self.devices = container_devices(
            plan=plan, vm_devices=services.vm_devices, tasks=tasks, find=environment.find_devices
        )
        self.network = SandboxNetwork(services, environment.network_connector)
        self.health = SandboxHealth(
            plan.sandbox_id, hypervisor=self.hypervisor, cgroups=self.cgroups, virtiofsd=lambda: self._virtiofsd
        )
        self.services = services
        self._env = environment
        self._agent: Agent | None = None
        self._virtiofsd: Virtiofsd | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._refusal = ""
        """Why the agent is not used any more; empty before the end."""
        self.vm_gone = asyncio.Event()
        """Set by `end` once the undo of VM, mounts and network was tried; cleared by `begin_end`."""
        self.pid = 0
        """The VMM's pid, also after its end, since containerd goes on using it.

        For a remote VM, the shim's, as with Kata.
        """
        self.origin = _booted(plan)
        """Booted, or cloned from which template: text for an operator, see `SandboxSnapshot`."""

    @property
    def is_left(self) -> bool:
        """Something of the sandbox is on the host, or may be."""
        return bool(self._undo or self._undo_after_vm)

    @property
    def virtiofsd_pid(self) -> int:
        """virtiofsd's pid, also after its end; 0 before its start."""
        return self._virtiofsd.pid if self._virtiofsd is not None else 0

    @property
    def agent(self) -> Agent:
        """The guest's agent. Raises Unavailable, with the reason of a loss, before the start and after the end."""
        if self._agent is None or self._refusal:
            raise Unavailable(f"use sandbox '{self.plan.sandbox_id}': {self._refusal or 'its vm is not running'}")
        return self._agent

    async def start(self, monitor: MonitorRpc, hooks: ContainerHooks) -> None:
        """The VM runs, its agent has the sandbox, and `monitor` is served. Call `end` also when this raises.

        The owner's `hooks` run before the network is read, since they may make it.
        """
        _log_sizing(self.plan)
        # Before the cgroups are entered: processes that a hook leaves behind, or that make a template, are not the
        # sandbox's.
        await self._run_hooks(hooks)
        template = await self._template()
        self._undo_after_vm.push(self.cgroups.leave)
        # Programs that serve the guest must start in the sandbox's cgroups. The kernel takes 10 to 20 ms to move the
        # shim there: time to make the share, which needs no program, and the network, whose programs end here.
        enter_cgroups = step("enter cgroups", self.cgroups.enter())
        if self.plan.config.is_remote:  # no process of this host serves the guest
            await together(enter_cgroups, self._connect_and_run(template, monitor))
        else:
            await together(enter_cgroups, self._connect())
            await self._run(template, monitor)

    async def _connect(self) -> None:
        await together(make_share(self.services), self.network.connect())

    async def _connect_and_run(self, template: str, monitor: MonitorRpc) -> None:
        await self._connect()
        await self._run(template, monitor)

    async def _run(self, template: str, monitor: MonitorRpc) -> None:
        """The VM runs, and its agent has the sandbox."""
        await self._start_virtiofsd()
        agent = await self._continue_from(template)
        if agent is None:
            await self._boot()
        await self._open_monitor(monitor)  # the guest boots meanwhile
        agent = await self.health.while_alive(self._reach_guest(agent))
        self.network.serve(agent)
        self._agent = agent

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
                return (await self.health.first_end(self._agent))[1]
        return otherwise

    def begin_end(self, failure: str) -> None:
        """From now on `agent` raises Unavailable. Call `end` next."""
        self._refusal = failure or "its vm is not running"
        self.vm_gone.clear()

    async def end(self, failure: str) -> None:
        """Every undo was tried. A failed one is logged and stays in the ledger; the next `end` tries it again.

        With a `failure`, the reason why the sandbox was lost, the guest is not asked to end.
        """
        agent, self._agent = self._agent, None
        await cancel_all(*self._watchers)
        self._watchers.clear()
        try:
            with span("stop vm", saved=False):
                if agent is not None and not failure:
                    await self._ask_guest_to_end(agent)
                problem = await self._undo.run()
        finally:
            self.vm_gone.set()
        with span("leave cgroups", saved=False):
            await self._undo_after_vm.run()
        if problem is not None:
            await self._undo.run()  # what was busy may have ended by now

    async def _start_virtiofsd(self) -> None:
        if self.plan.share.virtiofsd is None:
            return
        with span("start virtiofsd"):
            self._virtiofsd = await self._host.start_virtiofsd(self.plan.share.virtiofsd, self.services.ledger)
        self._undo.push(self._virtiofsd.stop)

    async def _continue_from(self, template: str) -> Agent | None:
        """The agent of the VM, which has continued from the template. None if it has to boot: then no VM is left."""
        base = self.plan.warm_vm
        if base is None or not template or self._has_to_boot(self.network.vm, base):
            return None
        facts = {"sandbox": self.plan.sandbox_id, "template": template}
        is_answering = False
        try:
            with span("continue from template"):
                await self._start_vmm(replace(base, is_copyable=True, saved_machine=template))
                agent = await self.health.while_alive(self._reach_continued_guest())
                is_answering = True
                await self.health.while_alive(self._fit_to_pod(base, agent))
        except ShimError as exc:
            if is_answering:  # the saved machine is good: what failed after it is the host's or this pod's
                log.warning("clone given up", extra={**facts, "error": str(exc)})
            else:
                log.warning("template discarded", extra={**facts, "error": str(exc)})
                await self._host.discard_template(template, str(exc))
            await self.hypervisor.stop()
            self.resizer.start_again()
            self.network.start_again()
            if self._virtiofsd is not None:
                await self._virtiofsd.stop()  # it ends with its first VM
                await self._start_virtiofsd()
            return None
        self.network.close_taps()
        log.info("vm continued", extra=facts)
        self.origin = f"cloned from {template.rpartition('/')[2]}"
        return agent

    async def _template(self) -> str:
        """The directory of the template to continue from; empty if the VM has to boot. May make one for later pods."""
        config, base = self.plan.config, self.plan.warm_vm
        if base is None or self._has_to_boot(self.plan.vm, base):
            return ""
        try:
            return await self._host.find_template(config.factory.template_path, base)
        except NotFound as exc:
            self._log_boot(str(exc))
        except ShimError as exc:
            self._log_boot(str(exc), logging.WARNING)
            return ""
        if not config.annotated:  # else pods could have any number of templates made
            try:
                await self._host.make_template(config.factory.template_path, base, config.source)
            except ShimError as exc:
                log.warning("no template made", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})
        return ""

    def _has_to_boot(self, vm: VmConfig, base: VmConfig) -> bool:
        if reason := reason_to_boot(vm, base):
            self._log_boot(reason)
        return bool(reason)

    def _log_boot(self, reason: str, level: int = logging.INFO) -> None:
        log.log(level, "vm boots", extra={"sandbox": self.plan.sandbox_id, "reason": reason})

    async def _reach_continued_guest(self) -> Agent:
        """The agent, which has answered; the guest has random numbers of its own and the right time."""
        agent = await step("wait for agent", self._connect_agent(min(CONTINUED_AGENT_S, self.plan.agent_timeout_s)))
        await agent.reseed_random(os.urandom(SEED_BYTES))
        await agent.set_time(self._env.clock_ns())
        return agent

    async def _fit_to_pod(self, base: VmConfig, agent: Agent) -> None:
        """The VM has this pod's size and devices."""
        await step("grow vm", self.resizer.grow_from(base, agent))
        with span("plug share and interfaces"):
            if self.plan.vm.share is not None:
                await self.hypervisor.plug(self.plan.vm.share)
            await self.network.plug()

    async def _boot(self) -> None:
        try:
            await self._start_vmm(self.network.vm)
        except ShimError as exc:
            if (explained := await self._explain_failed_boot(str(exc))) != str(exc):
                raise FailedPrecondition(explained) from exc
            raise
        finally:
            self.network.close_taps()

    async def _explain_failed_boot(self, error: str) -> str:
        """`error`, or its cause: virtiofsd ended before the VMM connected to it, or the kernel killed the VMM."""
        virtiofsd = self.plan.share.virtiofsd
        if self._virtiofsd is not None and virtiofsd is not None and virtiofsd.listen_path in error:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_REASON_S):
                    return f"start vm '{self.plan.sandbox_id}': {await self.health.virtiofsd_end()}"
        return await self.cgroups.explain_failed_start(error)

    async def _start_vmm(self, vm: VmConfig) -> None:
        self._undo.push_for(vm.stop_timeout_s, self.hypervisor.stop)
        async with self.cgroups.starting_vmm():
            await together(
                step("start vmm", self.hypervisor.create(vm)), step("allow devices", self.cgroups.restrict_devices())
            )
        self.pid = self.hypervisor.pid or os.getpid()
        await self.cgroups.place(self.hypervisor.pid, self.virtiofsd_pid)
        await self.hypervisor.start()

    async def _reach_guest(self, agent: Agent | None) -> Agent:
        """The agent, which has the sandbox now; it is connected first if `agent` is None."""
        if agent is None:
            agent = await self._reach_agent()
        await self._set_up_guest(agent)
        return agent

    @traced("wait for agent")
    async def _reach_agent(self) -> Agent:
        timeout_s = self.plan.agent_timeout_s
        try:
            return await self._connect_agent(timeout_s)
        except DeadlineExceeded as exc:
            tail = self.hypervisor.console_tail()
            raise DeadlineExceeded(f"{exc}; last console lines: {tail or '(none)'}") from exc

    async def _connect_agent(self, timeout_s: float) -> Agent:
        """An agent that answers. Each of the two waits has `timeout_s`, so that an error names the configured number.

        The undo is pushed here, since a caller that is cancelled at the end of the connect would not get the agent.
        """
        await self.hypervisor.await_agent_device(timeout_s)
        agent = await self._connector.connect(self.hypervisor.agent_address, timeout_s)
        self._undo.push(agent.close)
        return agent

    @traced("set up guest")
    async def _set_up_guest(self, agent: Agent) -> None:
        if policy := self.plan.config.agent.policy:
            await agent.set_policy(policy)  # first, since the agent applies it to every other call
        await self.network.set_up(agent)
        await agent.create_sandbox(self.plan.guest)

    def watch(self, lost: Callable[[str, str], None]) -> None:
        """A loss is reported to `lost`, with the part that was found gone and the reason; OOM kills to the listener."""
        agent = self.agent
        for name, work in (("end", self._watch_end(agent, lost)), ("oom", self._watch_oom(agent))):
            self._watchers.append(self._tasks.supervise(f"watch/{name}/{self.plan.sandbox_id}", work))

    async def _watch_end(self, agent: Agent, lost: Callable[[str, str], None]) -> None:
        lost(*await self.health.first_end(agent))

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
                for container_id in self.attachments.writers():
                    with suppress(ShimError):  # it was removed before, or the guest does not answer
                        await agent.remove_container(container_id, int(DESTROY_TIMEOUT_S))
                await agent.destroy_sandbox()
        except (ShimError, TimeoutError) as exc:
            log.debug("destroy sandbox", extra={"sandbox": self.plan.sandbox_id, "error": str(exc)})


def monitor_path(sandbox_id: str) -> str:
    """The socket's path, where Kata's programs look for it."""
    return f"{STATE_ROOT}/{sandbox_id}/{MONITOR_SOCKET}"


def _booted(plan: SandboxPlan) -> str:
    machine_type = plan.config.hypervisor.machine_type
    return f"{BOOTED} as {machine_type}" if plan.config.is_remote and machine_type else BOOTED


def _log_sizing(plan: SandboxPlan) -> None:
    sizing = plan.sizing
    explained = {"vcpus": sizing.vcpus.explain("vCPU"), "memory": sizing.memory_mib.explain("MiB")}
    log.info("sizing", extra={"sandbox": plan.sandbox_id, **explained})
    for warning in sizing.warnings:
        log.warning("capacity", extra={"sandbox": plan.sandbox_id, "problem": warning})
