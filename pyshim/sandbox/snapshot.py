"""The live objects as one frozen value, for `state/` to persist."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from pyshim.model.errors import ShimError
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.snapshot import ContainerSnapshot, ExecSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import Status
from pyshim.model.trace import Trace
from pyshim.plan.kata_config import kata_hypervisor_config
from pyshim.plan.kata_state import kata_device, kata_device_maps, kata_endpoint, kata_mounts, kata_sandbox_config
from pyshim.sandbox.container import Container
from pyshim.sandbox.sandbox import Sandbox
from pyshim.sandbox.seams import Records

log = logging.getLogger("pyshim.sandbox.snapshot")


class SavedState:
    """A sandbox's state on disk, as of the last call."""

    def __init__(self, records: Records, trace: Trace) -> None:
        self.records = records
        self._trace = trace
        self._last: SandboxSnapshot | None = None

    def save(self, snapshot: SandboxSnapshot) -> None:
        """It is on disk; a full disk must not fail the call that merely reports a change, and is logged."""
        self._last = snapshot
        try:
            self.records.save(snapshot)
        except ShimError as exc:
            log.warning("save state", extra={"sandbox": snapshot.sandbox_id, "error": str(exc)})

    def save_execs(self, container: Container) -> None:
        """`save` where nothing has changed but execs of `container`: an exec shall not pay for all of a pod."""
        if self._last is not None:
            self.save(_with_execs(self._last, container, self._trace))


def sandbox_snapshot(
    sandbox: Sandbox, containers: tuple[Container, ...], owner: ContainerId | None, trace: Trace
) -> SandboxSnapshot:
    plan = sandbox.plan
    return SandboxSnapshot(
        sandbox_id=plan.sandbox_id,
        status=_status(sandbox, containers),
        config_source=plan.config.source,
        hypervisor_type=plan.config.hypervisor_name,
        hypervisor=_hypervisor(sandbox),
        hypervisor_config=kata_hypervisor_config(plan),
        vmm_pid=sandbox.pid,
        agent_address=str(sandbox.hypervisor.agent_address) if sandbox.pid else "",
        netns_path=plan.netns_path or "",
        sizing=sandbox.resizer.record.as_json(),
        containers=tuple(_container(container, sandbox) for container in containers),
        failure=sandbox.failure,
        cgroups=sandbox.cgroups.saved(),
        owner=owner,
        endpoints=_endpoints(sandbox),
        devices=(
            *(kata_device(*attached) for attached in sandbox.attachments.all()),
            *sandbox.devices.saved(),
        ),
        sandbox_config=kata_sandbox_config(plan),
        trace=trace.as_json(),
    )


def _endpoints(sandbox: Sandbox) -> tuple[Mapping[str, object], ...]:
    network = sandbox.network.connected
    if network is None:
        return ()
    model = sandbox.plan.config.runtime.internetworking_model
    return tuple(kata_endpoint(nic, network.interfaces, model) for nic in network.nics)


def _hypervisor(sandbox: Sandbox) -> Mapping[str, object]:
    """Kata's HypervisorState; it counts virtiofsd to the hypervisor."""
    if not sandbox.pid:
        return {}
    return {**sandbox.hypervisor.saved(), "VirtiofsDaemonPid": sandbox.virtiofsd_pid}


def _status(sandbox: Sandbox, containers: tuple[Container, ...]) -> SandboxStatus:
    if sandbox.failure or sandbox.is_stopped:
        return SandboxStatus.STOPPED
    if not sandbox.pid:
        return SandboxStatus.CREATING
    running = any(container.init.status not in (Status.CREATED, Status.STOPPED) for container in containers)
    return SandboxStatus.RUNNING if running else SandboxStatus.READY


def _with_execs(snapshot: SandboxSnapshot, container: Container, trace: Trace) -> SandboxSnapshot:
    return replace(
        snapshot,
        trace=trace.as_json(),
        containers=tuple(
            replace(each, execs=_execs(container), moved=container.init.moved)
            if each.container_id == container.id
            else each
            for each in snapshot.containers
        ),
    )


def _execs(container: Container) -> tuple[ExecSnapshot, ...]:
    return tuple(
        ExecSnapshot(
            exec_id=process.exec_id or ExecId(""),
            status=process.status,
            stdio=process.stdio,
            exit=process.exit,
            moved=process.moved,
            spec=spec,
        )
        for process, spec in container.execs()
    )


def _container(container: Container, sandbox: Sandbox) -> ContainerSnapshot:
    init = container.init
    return ContainerSnapshot(
        container_id=container.id,
        bundle=container.request.bundle,
        status=init.status,
        stdio=init.stdio,
        exit=init.exit,
        rootfs=container.rootfs,
        moved=init.moved,
        execs=_execs(container),
        annotations=container.plan.guest.spec.get("annotations") or {},
        resources=sandbox.resizer.asked(container.id),
        device_maps=kata_device_maps(container.plan),
        mounts=kata_mounts(container.plan),
    )
