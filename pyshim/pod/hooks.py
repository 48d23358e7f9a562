"""The OCI hooks of one container that run on the host: before it is created, after it has started, after it is gone."""

import logging
from collections.abc import Sequence

from pyshim.model.errors import ShimError
from pyshim.model.ids import HostPath
from pyshim.model.observation import step
from pyshim.model.oci import OciHook, OciSpec
from pyshim.model.seams import Host
from pyshim.pod.plan.hooks import hook_state, makes_network

log = logging.getLogger(__name__)


class ContainerHooks:
    def __init__(self, host: Host, spec: OciSpec, *, name: str, bundle: HostPath) -> None:
        """`name` is the container's id, or that of a sandbox without one."""
        self._host = host
        self._spec = spec
        self._name = name
        self._bundle = bundle
        self._begun = False

    @property
    def make_network(self) -> bool:
        """Hooks run before the creation, and may add interfaces to the pod's network namespace."""
        return makes_network(self._spec)

    @property
    def follow_delete(self) -> bool:
        """Hooks run after the container is gone."""
        return bool(self._spec.hooks.poststop)

    async def before_create(self, pid: int) -> None:
        """The prestart and createRuntime hooks have run, in order. Raises at the first hook that fails.

        `pid` is a process in the pod's network namespace, 0 for none.
        """
        self._begun = True
        hooks = self._spec.hooks
        for kind, of_kind in (("prestart", hooks.prestart), ("createRuntime", hooks.create_runtime)):
            for hook in of_kind or ():
                await step(f"{kind} hook", self._host.run_hook(kind, hook, self._state("creating", pid)))

    async def after_start(self, pid: int) -> None:
        """The poststart hooks have run. A failure is logged, as the OCI spec says, and the container runs on."""
        await self._run_all("poststart", self._spec.hooks.poststart or (), "running", pid)

    async def after_delete(self) -> None:
        """The poststop hooks have run, if `before_create` was called since the last time. A failure is logged."""
        if self._begun:
            self._begun = False
            await self._run_all("poststop", self._spec.hooks.poststop or (), "stopped", 0)

    async def _run_all(self, kind: str, hooks: Sequence[OciHook], status: str, pid: int) -> None:
        for hook in hooks:
            try:
                await self._host.run_hook(kind, hook, self._state(status, pid))
            except ShimError as error:
                log.warning("hook failed", extra={"container": self._name, "error": str(error)})

    def _state(self, status: str, pid: int) -> bytes:
        return hook_state(self._spec, container_id=self._name, bundle=self._bundle, status=status, pid=pid)
