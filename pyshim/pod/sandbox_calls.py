"""containerd's Sandbox API: a pod's VM starts and ends by calls of its own, before and after its containers.

Its phases are those of `life.py`. `Pod` makes the VM, in the same way as for a pod with a pause container.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyshim.concurrency.tasks import to_the_end
from pyshim.model.errors import AlreadyExists, NotFound
from pyshim.model.guest import ContainerStats
from pyshim.model.ids import SandboxId
from pyshim.model.oci import OciSpec
from pyshim.model.sandbox import CreateSandbox, EndedBy, Phase, SandboxReport, SandboxRequest
from pyshim.model.task import ExitStatus, RuntimeOptions
from pyshim.model.vm import LocalVm
from pyshim.pod.creation import sandbox_request
from pyshim.pod.environment import Environment
from pyshim.pod.hooks import ContainerHooks
from pyshim.pod.life import SandboxLife
from pyshim.pod.pod import Pod
from pyshim.pod.sandbox import Sandbox

PING_TIMEOUT_S = 5.0


class _Created(NamedTuple):
    request: SandboxRequest
    life: SandboxLife
    hooks: ContainerHooks
    at_ns: int


class SandboxCalls:
    """Implements `task.sandbox_service.SandboxApi` for `pod`."""

    def __init__(self, *, pod: Pod, environment: Environment, options: RuntimeOptions | None) -> None:
        """`options` are the runtime handler's, which containerd passes to `start` only."""
        self._pod = pod
        self._env = environment
        self._options = options
        self._created: _Created | None = None

    async def create(self, request: CreateSandbox) -> None:
        if self._created is not None:
            other = self._created.request.sandbox_id
            raise AlreadyExists(f"create sandbox '{request.sandbox_id}': this shim has '{other}'")
        self._pod.refuse_second(request.sandbox_id)
        found = await sandbox_request(self._env, request, self._options)
        life = self._pod.begin_sandbox(request.sandbox_id, owner=None)
        hooks = ContainerHooks(self._env.host, found.spec, name=request.sandbox_id, bundle=request.bundle)
        self._created = _Created(found, life, hooks, self._env.clock_ns())

    async def start(self, sandbox_id: SandboxId) -> SandboxReport:
        request, life, hooks, _ = self._find(sandbox_id)
        try:
            sandbox = await life.open(lambda: self._pod.make_sandbox(life, request, hooks))
        except BaseException:
            if life.phase not in (Phase.OPENING, Phase.RUNNING):  # a caller that gave up ends nothing
                await to_the_end(hooks.after_delete())
            raise
        await hooks.after_start(sandbox.pid)
        return self.status(sandbox_id, verbose=False)

    async def update(self, sandbox_id: SandboxId, resources: Mapping[str, Any]) -> None:
        await self._find(sandbox_id).life.running.vm.resizer.update_pod(resources)

    def check(self, sandbox_id: SandboxId) -> None:
        self._find(sandbox_id)

    def status(self, sandbox_id: SandboxId, verbose: bool) -> SandboxReport:
        request, life, _, at_ns = self._find(sandbox_id)
        sandbox = None if life.phase in (Phase.NEW, Phase.OPENING) else life.sandbox
        return SandboxReport(
            sandbox_id=sandbox_id,
            pid=sandbox.pid if sandbox else 0,
            is_ready=life.phase in (Phase.RUNNING, Phase.ENDING) and sandbox is not None,
            created_at_ns=at_ns,
            exit=life.exit.result() if life.exit.done() else None,
            info=_info(sandbox, request.spec) if sandbox and verbose else {},
            spec=request.spec.raw if sandbox else {},
        )

    async def stop(self, sandbox_id: SandboxId) -> None:
        created = self._find(sandbox_id)
        await created.life.end(EndedBy.STOP)
        await created.hooks.after_delete()

    async def wait(self, sandbox_id: SandboxId) -> ExitStatus:
        return await asyncio.shield(self._find(sandbox_id).life.exit)

    async def ping(self, sandbox_id: SandboxId) -> None:
        await self._find(sandbox_id).life.running.agent.check(PING_TIMEOUT_S)

    async def stats(self, sandbox_id: SandboxId) -> ContainerStats:
        """The pod's use of the host by its cgroup's figures, not the guest's."""
        return await self._find(sandbox_id).life.running.cgroups.stats()

    async def shutdown(self, sandbox_id: SandboxId) -> None:
        """The sandbox is gone. Works for one that was refused, too: containerd waits for the end of its shim."""
        if self._created is not None or not self._pod.is_empty:
            await self.stop(sandbox_id)
        await self._pod.close()

    def _find(self, sandbox_id: SandboxId) -> _Created:
        if self._created is None or self._created.request.sandbox_id != sandbox_id:
            raise NotFound(f"find sandbox '{sandbox_id}': no such sandbox in this shim")
        return self._created


def _info(sandbox: Sandbox, spec: OciSpec) -> Mapping[str, str]:
    """What `crictl inspectp` shows; each value is JSON. `info` has what node agents look for in every pod's: pid, and
    the network namespace's path in the spec. Source: containerd's internal/cri/server/podsandbox/types, SandboxInfo.
    """
    plan, vm = sandbox.plan, sandbox.vm
    shown = {
        "vmmPid": vm.hypervisor.pid,
        "virtiofsdPid": vm.virtiofsd_pid,
        "accelerator": plan.vm.cpu.accelerator if isinstance(plan.vm, LocalVm) else "",
        "hypervisor": plan.config.hypervisor_name,
        "agent": str(vm.hypervisor.agent_address),
        "configuration": plan.config.source,
        "origin": vm.origin,
        "vcpus": vm.resizer.vcpus,
        "memoryMiB": vm.resizer.memory_mib,
    }
    known = {"pid": sandbox.pid, "runtimeSpec": spec.raw}
    return {"info": json.dumps(known), "vm": json.dumps(shown), "sizing": json.dumps(vm.resizer.record.as_json())}
