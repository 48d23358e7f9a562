"""The births of a pod's VM: by continuing a template, by booting, or by a service that makes it on another host.

A birth makes a running VM with an agent that has answered. `Sandbox` tries those of `births` in order. Each attempt has
new parts, a `PodVm`, and what it did is undone before the next. So nothing that a failed one has plugged, or learned
about its guest, is seen by another.

A template is a machine that was saved to disk once its agent had answered. A VM that continues from it is a clone.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

from msgspec.structs import replace

from pyshim.concurrency.tasks import END_REASON_S, together
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.model.host_facts import HostFacts, lacks_groups
from pyshim.model.observation import span, step
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Agent, Host, Virtiofsd
from pyshim.model.vm import LocalVm, RemoteVm, VmConfig
from pyshim.pod.environment import Environment
from pyshim.pod.health import SandboxHealth
from pyshim.resources.cgroups.live import SandboxCgroups
from pyshim.resources.devices.live import container_devices
from pyshim.resources.devices.vm_devices import VmDevices
from pyshim.resources.network.live import GuestNetwork, SandboxNetwork
from pyshim.resources.services import SandboxServices, VmServices
from pyshim.resources.sizing.live import Resizer
from pyshim.resources.sizing.swap import GuestSwap
from pyshim.resources.templates.plan import reason_to_boot
from pyshim.resources.templates.store import TemplateDamaged
from pyshim.resources.volumes.attachments import Attachments

log = logging.getLogger(__name__)

BOOTED = "booted"
CONTINUED_AGENT_S = 60.0
"""Seconds for the agent of a continued guest to answer; then the template is discarded and the VM boots. More than a
crowded host needs: 6 s where 30 emulated VMs begin on two cores."""
SEED_BYTES = 512
"""Random bytes of the host for each guest that continues, as many as with Kata."""


class PodVm:
    """One VM, from its file server to its agent, and what the shim has for it alone."""

    def __init__(
        self,
        services: SandboxServices,
        *,
        host_facts: HostFacts,
        environment: Environment,
        cgroups: SandboxCgroups,
        network: SandboxNetwork,
    ) -> None:
        plan = self.plan = services.plan
        self._connector = environment.connector_factory(plan.config)
        self._cgroups = cgroups
        self._services = services
        self._agent: Agent | None = None
        self._refusal = ""
        self._virtiofsd: Virtiofsd | None = None
        self._has_noted_groups = False
        self.pid = 0
        """The VMM's pid, also after its end, since containerd goes on using it; 0 before its start. For a remote VM,
        the shim's, as with Kata."""
        self.origin = ""
        """How it was born, for an operator; see `SandboxSnapshot`."""
        self.is_clone = False
        self.hypervisor = environment.hypervisor_factory(services.ledger, plan.config.hypervisor_name)
        self.devices = VmDevices(self.hypervisor, allow=cgroups.allow)
        self.resizer = Resizer(
            plan=plan,
            host=host_facts,
            hypervisor=self.hypervisor,
            agent=lambda: self.agent,
            tasks=services.tasks,
            on_change=services.on_change,
            fit=cgroups.fit,
        )
        vm_services = VmServices.of(services, self.devices)
        self.attachments = Attachments(vm_services)
        self.swap = GuestSwap(services, attachments=self.attachments, agent=lambda: self.agent)
        self.container_devices = container_devices(
            plan=plan, vm_devices=self.devices, tasks=services.tasks, find=environment.find_devices
        )
        self.network = GuestNetwork(vm_services, network)
        self.health = SandboxHealth(
            plan.sandbox_id, hypervisor=self.hypervisor, cgroups=cgroups, virtiofsd=lambda: self._virtiofsd
        )

    @property
    def agent(self) -> Agent:
        """The guest's agent. Raises Unavailable, with the reason of a loss, before its first answer and at the end."""
        if self._agent is None or self._refusal:
            raise Unavailable(f"use sandbox '{self.plan.sandbox_id}': {self._refusal or 'its vm is not running'}")
        return self._agent

    @property
    def virtiofsd_pid(self) -> int:
        """virtiofsd's pid, also after its end; 0 before its start."""
        return self._virtiofsd.pid if self._virtiofsd is not None else 0

    def note_groups(self, container_id: str, group_ids: Sequence[int]) -> None:
        """The log says, once for a pod, that supplementary groups give a container no rights on shared files.

        Both the file server and the guest's kernel have to support them.
        """
        share = self._virtiofsd
        if group_ids and share is not None and not self._has_noted_groups:
            self._has_noted_groups = True
            self._services.tasks.supervise("note groups", self._note_groups(share, container_id, group_ids))

    async def _note_groups(self, share: Virtiofsd, container_id: str, group_ids: Sequence[int]) -> None:
        reason = "QEMU's C virtiofsd"
        if share.takes_groups:
            try:
                release = await self._services.host.kernel_release(self.plan.local_vm.boot.kernel)
            except ShimError as exc:
                log.debug("guest's kernel not known", extra={"error": str(exc)})
                return
            if not lacks_groups(release):
                return
            reason = f"Linux {release} in the guest"
        log.warning(
            "supplementary groups give no rights on shared files",
            extra={"container": container_id, "groups": list(group_ids), "reason": reason},
        )

    def take_agent(self) -> Agent | None:
        """The agent, if it has answered, for its last calls; `agent` raises Unavailable from now on."""
        agent, self._agent = self._agent, None
        return agent

    def refuse(self, reason: str) -> None:
        """From now on `agent` raises Unavailable."""
        self._refusal = reason

    async def start_virtiofsd(self) -> None:
        """The share's file server runs, if the plan has one. It ends with its VM."""
        plan, services = self.plan.share.virtiofsd, self._services
        if plan is not None:
            self._virtiofsd = await step("start virtiofsd", services.host.start_virtiofsd(plan, services.ledger))
            services.undo.push(self._virtiofsd.stop)

    async def start(self, config: VmConfig) -> None:
        """The VM's CPUs run, and all its processes are in their cgroups."""
        self._services.undo.push_for(config.stop_timeout_s, self.hypervisor.stop)
        async with self._cgroups.starting_vmm():
            await together(
                step("start vmm", self.hypervisor.create(config)),
                step("allow devices", self._cgroups.restrict_devices()),
            )
        self.pid = self.hypervisor.pid or os.getpid()
        await self._cgroups.place(self.hypervisor, self.virtiofsd_pid)
        await self.hypervisor.start()

    async def reach_agent(self, timeout_s: float) -> Agent:
        """An agent that answers. Each of the two waits has `timeout_s`, so that an error names the configured number.

        The undo is pushed here, since a caller that is cancelled at the end of the connect would not get the agent.
        """
        with span("wait for agent"):
            await self.hypervisor.await_agent_device(timeout_s)
            agent = await self._connector.connect(self.hypervisor.agent_address, timeout_s)
            self._services.undo.push(agent.close)
            self._agent = agent
            return agent

    async def explain_failed_start(self, error: str) -> str:
        """`error`, or its cause: virtiofsd ended before the VMM connected to it, or the kernel killed the VMM."""
        virtiofsd = self.plan.share.virtiofsd
        if self._virtiofsd is not None and virtiofsd is not None and virtiofsd.listen_path in error:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_REASON_S):
                    return f"start vm '{self.plan.sandbox_id}': {await self.health.virtiofsd_end()}"
        return await self._cgroups.explain_failed_start(error)


class Birth(Protocol):
    origin: str

    def traced(self) -> AbstractContextManager[None]:
        """The span of `start` and `reach`."""

    async def start(self, vm: PodVm) -> None:
        """The VM's CPUs run. Raises ShimError."""

    async def reach(self, vm: PodVm) -> None:
        """The agent has answered; the VM has the pod's size and devices. Raises ShimError."""

    async def gives_way(self, error: ShimError) -> bool:
        """True if the next birth is to be tried after `error`. Called before what this one did is undone."""


class Boot:
    """The guest boots with all that the pod needs at its start."""

    origin = BOOTED

    def __init__(self, config: VmConfig) -> None:
        self._config = config

    def traced(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def start(self, vm: PodVm) -> None:
        try:
            await vm.start(self._config)
        except ShimError as exc:
            if (explained := await vm.explain_failed_start(str(exc))) != str(exc):
                raise FailedPrecondition(explained) from exc
            raise
        finally:
            vm.network.close_taps()

    async def reach(self, vm: PodVm) -> None:
        try:
            await vm.reach_agent(vm.plan.agent_timeout_s)
        except DeadlineExceeded as exc:
            tail = vm.hypervisor.console_tail()
            raise DeadlineExceeded(f"{exc}; last console lines: {tail or '(none)'}") from exc

    async def gives_way(self, error: ShimError) -> bool:
        return False


class Remote(Boot):
    """A service makes the VM on another host, where it boots."""

    def __init__(self, config: RemoteVm) -> None:
        super().__init__(config)
        self.origin = f"{BOOTED} as {config.machine_type}" if config.machine_type else BOOTED


class Continue:
    """The guest goes on from a template, and then gets the pod's size, share and interfaces."""

    def __init__(self, template: str, base: LocalVm, environment: Environment) -> None:
        """`template` is its directory, `base` the VM that was saved there."""
        self.origin = f"cloned from {template.rpartition('/')[2]}"
        self._template = template
        self._base = base
        self._env = environment
        self._has_answered = False

    def traced(self) -> AbstractContextManager[None]:
        return span("continue from template")

    async def start(self, vm: PodVm) -> None:
        await vm.start(replace(self._base, is_copyable=True, saved_machine=self._template))

    async def reach(self, vm: PodVm) -> None:
        agent = await vm.reach_agent(min(CONTINUED_AGENT_S, vm.plan.agent_timeout_s))
        # Clones would otherwise draw the same random numbers, at the time at which the template was saved.
        await agent.reseed_random(os.urandom(SEED_BYTES))
        await agent.set_time(self._env.clock_ns())
        self._has_answered = True
        await step("grow vm", vm.resizer.grow_from(self._base, agent))
        with span("plug share and interfaces"):
            if (share := vm.plan.local_vm.share) is not None:
                await vm.hypervisor.plug(share)
            await vm.network.plug()
        vm.network.close_taps()
        vm.is_clone = True
        log.info("vm continued", extra={"sandbox": self._base.sandbox_id, "template": self._template})

    async def gives_way(self, error: ShimError) -> bool:
        facts = {"sandbox": self._base.sandbox_id, "template": self._template, "error": str(error)}
        if self._has_answered:  # the saved machine is good: what failed after it is the host's or this pod's
            log.warning("clone given up", extra=facts)
        else:
            log.warning("template discarded", extra=facts)
            await self._env.host.discard_template(self._template, str(error))
        return True


def births(plan: SandboxPlan, vm: VmConfig, template: str, environment: Environment) -> tuple[Birth, ...]:
    """The births to try, in order; the last one's error is the sandbox's.

    `vm` is the plan's with its network, `template` a template's directory, empty for none.
    """
    if isinstance(vm, RemoteVm):
        return (Remote(vm),)
    base = plan.warm_vm
    if base is None or not template or _has_to_boot(plan, vm, base):
        return (Boot(vm),)
    return (Continue(template, base, environment), Boot(vm))


async def find_template(plan: SandboxPlan, host: Host) -> str:
    """The directory of the template to continue from; empty if the VM has to boot. May make one for later pods."""
    config, base = plan.config, plan.warm_vm
    if base is None or _has_to_boot(plan, plan.local_vm, base):
        return ""
    try:
        return await host.find_template(config.factory.template_path, base)
    except NotFound as exc:
        _log_boot(plan, str(exc))
    except TemplateDamaged as exc:
        log.warning("template discarded", extra={"sandbox": plan.sandbox_id, "error": str(exc)})
        return ""
    except ShimError as exc:
        _log_boot(plan, str(exc), logging.WARNING)
        return ""
    if not config.annotated:  # else pods could have any number of templates made
        try:
            await host.make_template(config.factory.template_path, base, config.source)
        except ShimError as exc:
            log.warning("no template made", extra={"sandbox": plan.sandbox_id, "error": str(exc)})
    return ""


def _has_to_boot(plan: SandboxPlan, vm: LocalVm, base: LocalVm) -> bool:
    if reason := reason_to_boot(vm, base):
        _log_boot(plan, reason)
    return bool(reason)


def _log_boot(plan: SandboxPlan, reason: str, level: int = logging.INFO) -> None:
    log.log(level, "vm boots", extra={"sandbox": plan.sandbox_id, "reason": reason})
