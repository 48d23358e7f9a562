"""The sandbox and its containers as one frozen value, and its write to disk."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from pyshim.model.errors import ShimError
from pyshim.model.observation import Trace
from pyshim.model.oci import PodName
from pyshim.model.sandbox import ContainerSnapshot, Phase, SandboxSnapshot, SandboxStatus
from pyshim.model.seams import Records
from pyshim.model.task import Status
from pyshim.pod.container import Container
from pyshim.pod.life import SandboxLife
from pyshim.pod.plan.kata_config import kata_hypervisor_config
from pyshim.pod.plan.kata_state import (
    kata_annotations,
    kata_device,
    kata_device_maps,
    kata_endpoint,
    kata_mounts,
    kata_sandbox_config,
)
from pyshim.pod.sandbox import Sandbox

log = logging.getLogger(__name__)

SAVE_DELAY_S = 0.005
"""Seconds from a change to its write: Start mostly follows Create sooner, so that one write serves both."""


class SavedState:
    """A sandbox's state on disk."""

    def __init__(self, records: Records, take: Callable[[], SandboxSnapshot]) -> None:
        """`take` returns the sandbox as it is now."""
        self.records = records
        self._take = take
        self._is_saved = False
        self._soon: asyncio.TimerHandle | None = None

    def save(self) -> None:
        """The state on disk is current. A failure is only logged: a full disk must not fail the call that is saved."""
        self._cancel_soon()
        self._is_saved = True
        snapshot = self._take()
        try:
            self.records.save(snapshot)
        except ShimError as exc:
            log.warning("save state", extra={"sandbox": snapshot.sandbox_id, "error": str(exc)})

    def save_soon(self) -> None:
        """The state on disk is current within SAVE_DELAY_S. Does nothing before the first `save`."""
        if self._soon is None and self._is_saved:
            self._soon = asyncio.get_running_loop().call_later(SAVE_DELAY_S, self.save)

    def remove(self) -> None:
        """As `Records.remove`. A save that waits is dropped, and a later `save_soon` does nothing."""
        self._cancel_soon()
        self._is_saved = False
        self.records.remove()

    def _cancel_soon(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None


def sandbox_snapshot(
    life: SandboxLife, sandbox: Sandbox, containers: Collection[Container], pod: PodName, trace: Trace
) -> SandboxSnapshot:
    plan, vm = sandbox.plan, sandbox.vm
    return SandboxSnapshot(
        sandbox_id=plan.sandbox_id,
        status=_status(life, containers),
        phase=life.phase,
        ended_by=life.ended_by,
        config_source=plan.config.source,
        hypervisor_type=plan.config.hypervisor_name,
        hypervisor=_hypervisor(sandbox),
        hypervisor_config=kata_hypervisor_config(plan),
        vmm_pid=sandbox.pid,
        agent_address=str(sandbox.vm.hypervisor.agent_address) if sandbox.pid else "",
        netns_path=plan.netns_path or "",
        sizing=sandbox.vm.resizer.record.as_json(),
        containers=tuple(_container(container, sandbox) for container in containers),
        failure=life.failure,
        cgroups=sandbox.cgroups.saved(),
        owner=life.owner,
        pod=f"{pod.namespace}/{pod.name}" if pod.name else "",
        endpoints=_endpoints(sandbox),
        devices=(*(kata_device(*attached) for attached in vm.attachments.all()), *vm.container_devices.saved()),
        sandbox_config=kata_sandbox_config(plan),
        origin=sandbox.vm.origin,
        trace=trace.as_json(),
    )


def _endpoints(sandbox: Sandbox) -> tuple[Mapping[str, object], ...]:
    network = sandbox.network.connected
    if network is None:
        return ()
    model = sandbox.plan.config.runtime.internetworking_model
    return tuple(kata_endpoint(nic, network.interfaces, model) for nic in network.nics)


def _hypervisor(sandbox: Sandbox) -> Mapping[str, object]:
    """Kata's HypervisorState, which includes virtiofsd."""
    if not sandbox.pid:
        return {}
    return {**sandbox.vm.hypervisor.saved(), "VirtiofsDaemonPid": sandbox.vm.virtiofsd_pid}


def _status(life: SandboxLife, containers: Collection[Container]) -> SandboxStatus:
    if life.phase in (Phase.NEW, Phase.OPENING):
        return SandboxStatus.CREATING
    if life.phase is not Phase.RUNNING:
        return SandboxStatus.STOPPED
    running = any(container.init.status not in (Status.CREATED, Status.STOPPED) for container in containers)
    return SandboxStatus.RUNNING if running else SandboxStatus.READY


def _container(container: Container, sandbox: Sandbox) -> ContainerSnapshot:
    init = container.init
    return ContainerSnapshot(
        container_id=container.id,
        bundle=container.request.bundle,
        status=init.status,
        stdio=init.stdio,
        exit=init.exit,
        rootfs=container.plan.rootfs,
        annotations=kata_annotations(container.plan, container.request.bundle),
        resources=sandbox.vm.resizer.asked(container.id),
        device_maps=kata_device_maps(container.plan),
        mounts=kata_mounts(container.plan),
    )
