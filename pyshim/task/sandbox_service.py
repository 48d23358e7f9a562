"""containerd's Sandbox API: every method decodes, calls the sandbox, encodes."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pyshim.model.guest import ContainerStats
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import SandboxId
from pyshim.model.sandbox import CreateSandbox, SandboxReport
from pyshim.model.task import ExitStatus
from pyshim.task import translate_sandbox as translate
from pyshim.task import translate_stats
from pyshim.task.calls import Calls, Method
from pyshim.task.translate import empty_reply
from pyshim.ttrpc import Handler

SANDBOX_SERVICE = "containerd.runtime.sandbox.v1.Sandbox"


class SandboxApi(Protocol):
    """The Sandbox API in model values. Every call raises ShimError; NotFound for another sandbox than the one created.

    Callers that gave up repeat calls. A call ends with its work done or undone even if its caller has ended.
    """

    async def create(self, request: CreateSandbox) -> None:
        """The request is accepted; nothing on the host but files in its bundle has changed."""

    async def start(self, sandbox_id: SandboxId) -> SandboxReport:
        """The VM runs."""

    async def update(self, sandbox_id: SandboxId, resources: Mapping[str, Any]) -> None:
        """The VM has at least `resources` (OCI's LinuxResources), the limits of the whole pod."""

    def check(self, sandbox_id: SandboxId) -> None: ...
    async def stop(self, sandbox_id: SandboxId) -> None:
        """The VM and all containers have ended."""

    async def wait(self, sandbox_id: SandboxId) -> ExitStatus:
        """Once the VM has ended; may be cancelled, and then nothing has changed."""

    def status(self, sandbox_id: SandboxId, verbose: bool) -> SandboxReport: ...
    async def ping(self, sandbox_id: SandboxId) -> None:
        """The guest's agent has answered."""

    async def stats(self, sandbox_id: SandboxId) -> ContainerStats: ...
    async def shutdown(self, sandbox_id: SandboxId) -> None:
        """Nothing is left, and this process may end."""


class SandboxService:
    """The Sandbox API over `sandbox`; calls `on_shutdown` once containerd's ShutdownSandbox left nothing to serve."""

    def __init__(
        self, *, sandbox: SandboxApi, cgroup_mode: CgroupMode, calls: Calls, on_shutdown: Callable[[], None]
    ) -> None:
        self._sandbox = sandbox
        self._cgroup_mode = cgroup_mode
        self._calls = calls
        self._on_shutdown = on_shutdown

    def services(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers for a ttrpc server."""
        api, ref = self._sandbox, translate.sandbox_ref
        waiting = {
            "CreateSandbox": Method(translate.create_request, api.create, empty_reply),
            "StartSandbox": Method(ref, lambda r: api.start(*r), translate.start_reply),
            # `timeout_secs` is ignored: containerd has stopped the containers, and a VM takes no SIGTERM.
            "StopSandbox": Method(ref, lambda r: api.stop(*r), empty_reply),
            "UpdateSandbox": Method(translate.update_request, lambda r: api.update(*r), empty_reply),
            "WaitSandbox": Method(ref, lambda r: api.wait(*r), translate.wait_reply),
            "PingSandbox": Method(ref, lambda r: api.ping(*r), empty_reply),
            "SandboxMetrics": Method(ref, self._metrics, translate.metrics_reply),
            "ShutdownSandbox": Method(ref, self._shutdown, empty_reply),
        }
        immediate = {
            "Platform": Method(ref, self._platform, translate.platform_reply),
            "SandboxStatus": Method(translate.status_request, lambda r: api.status(*r), translate.status_reply),
        }
        return {SANDBOX_SERVICE: self._calls.handlers(waiting, immediate)}

    def _platform(self, request: translate.SandboxRef) -> str:
        self._sandbox.check(request.sandbox_id)
        return os.uname().machine

    async def _metrics(self, request: translate.SandboxRef) -> translate.Measured:
        stats = await self._sandbox.stats(request.sandbox_id)
        metrics = translate_stats.metrics(stats, self._cgroup_mode)
        return translate.Measured(request.sandbox_id, metrics, time.time_ns())

    async def _shutdown(self, request: translate.SandboxRef) -> None:
        await self._sandbox.shutdown(request.sandbox_id)
        self._on_shutdown()
