"""The live objects as one frozen value, for `state/` to persist."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from pyshim.model.errors import ShimError
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.seams import Records
from pyshim.model.snapshot import ContainerSnapshot, ExecSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import Status
from pyshim.model.trace import Trace
from pyshim.pod.container import Container
from pyshim.pod.plan.kata_config import kata_hypervisor_config
from pyshim.pod.plan.kata_state import kata_device, kata_device_maps, kata_endpoint, kata_mounts, kata_sandbox_config
from pyshim.pod.sandbox import Sandbox

log = logging.getLogger(__name__)


EXECS_WRITTEN_AFTER_S = 0.2
"""Nothing on the host hangs on an exec, and most have come and gone by then: a probe of the kubelet costs no write."""


AFTER_REPLY_S = 0.005
"""Create's reply brings Start's call, mostly sooner: one write tells of both. And none of the two waits for it."""


class SavedState:
    """A sandbox's state on disk: as of the last `save`, with what has begun or execs have changed a moment later."""

    def __init__(self, records: Records, trace: Trace, take: Callable[[], SandboxSnapshot]) -> None:
        """`take` tells how it is now."""
        self.records = records
        self._trace = trace
        self._take = take
        self._last: SandboxSnapshot | None = None
        self._changed: dict[ContainerId, Container] = {}
        """Whose execs have changed since."""
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None

    def save(self) -> None:
        """How it is now is on disk; a full disk must not fail the call that merely reports a change, and is logged."""
        self._write(self._take())

    def _write(self, snapshot: SandboxSnapshot) -> None:
        self._forget_changes()
        self._last = snapshot
        try:
            self.records.save(snapshot)
        except ShimError as exc:
            log.warning("save state", extra={"sandbox": snapshot.sandbox_id, "error": str(exc)})

    def save_soon(self) -> None:
        """How it is then is on disk when the reply has left, unless there is a `save` before."""
        if self._soon is None and self._last is not None:
            self._soon = asyncio.get_running_loop().call_later(AFTER_REPLY_S, self.save)

    def save_execs(self, container: Container) -> None:
        """The same soon, where nothing has changed but execs of `container`: they shall not pay for all of a pod."""
        self._changed[container.id] = container
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EXECS_WRITTEN_AFTER_S, self._save_changed)

    def remove(self) -> None:
        """As `Records.remove`; and what changes now or has just changed is not written any more."""
        self._forget_changes()
        self._last = None
        self.records.remove()

    def _forget_changes(self) -> None:
        self._changed.clear()
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon = None

    def _save_changed(self) -> None:
        self._timer = None
        if self._last is None:
            return
        containers = tuple(
            replace(each, execs=_execs(changed), moved=changed.init.moved)
            if (changed := self._changed.get(each.container_id))
            else each
            for each in self._last.containers
        )
        self._changed.clear()
        now = replace(self._last, containers=containers, trace=self._trace.as_json())
        if now != self._last:
            self._write(now)


def sandbox_snapshot(
    sandbox: Sandbox, containers: Collection[Container], owner: ContainerId | None, trace: Trace
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


def _status(sandbox: Sandbox, containers: Collection[Container]) -> SandboxStatus:
    if sandbox.failure or sandbox.is_stopped:
        return SandboxStatus.STOPPED
    if not sandbox.pid:
        return SandboxStatus.CREATING
    running = any(container.init.status not in (Status.CREATED, Status.STOPPED) for container in containers)
    return SandboxStatus.RUNNING if running else SandboxStatus.READY


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
