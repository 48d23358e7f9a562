"""Waits for the end of the parts that a sandbox needs: its VM, virtiofsd and the agent.

A local VM ends with its process. A remote one may be gone while the connection to its agent stays, since that goes
through the service. Calls then fail or get no answer, so the agent's health is checked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from hypervisors.base import Hypervisor
from pyshim.concurrency.tasks import END_REASON_S, cancel_all, while_alive
from pyshim.model.errors import AgentGone, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.seams import Agent, Virtiofsd
from pyshim.resources.cgroups.live import SandboxCgroups

T = TypeVar("T")

CHECK_PAUSE_S = 30.0
"""Seconds between two checks, so that an idle pod costs next to nothing."""
RETRY_PAUSE_S = 10.0
"""Seconds from a failed check to the next one."""
TIMEOUT_S = 30.0
"""Kata's limit for this call."""
MAX_FAILED_CHECKS = 3
"""Failed checks in a row after which the sandbox is lost: a busy guest or network may fail some."""


class SandboxHealth:
    def __init__(
        self,
        sandbox_id: SandboxId,
        *,
        hypervisor: Hypervisor,
        cgroups: SandboxCgroups,
        virtiofsd: Callable[[], Virtiofsd | None],
    ) -> None:
        """`virtiofsd` returns the running daemon; None before its start and in a sandbox without."""
        self._sandbox_id = sandbox_id
        self._hypervisor = hypervisor
        self._cgroups = cgroups
        self._virtiofsd = virtiofsd
        self.failed_checks = 0
        """All failed checks of the agent, for the metrics."""

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises Unavailable with the reason as soon as the VM or virtiofsd ends."""
        return await while_alive(work, self._reason_of_end(), action=f"start vm '{self._sandbox_id}'")

    async def _reason_of_end(self) -> str:
        return (await self.first_end())[1]

    async def first_end(self, agent: Agent | None = None) -> tuple[str, str]:
        """The part that has ended, `vm`, `virtiofsd`, `agent` or `health`, and why; the last two only with `agent`.

        The VM's own reason is preferred if it comes soon, since the other parts mostly end because of it.
        """
        waits: dict[str, Callable[[], Awaitable[str]]] = {"vm": self._vm_end}
        if self._virtiofsd() is not None:
            waits["virtiofsd"] = self.virtiofsd_end
        if agent is not None:
            waits["agent"] = partial(_connection_end, agent)
            if not self._hypervisor.capabilities().reports_end:
                waits["health"] = partial(self._checks_end, agent)
        ends = {name: asyncio.ensure_future(wait()) for name, wait in waits.items()}
        try:
            await asyncio.wait(ends.values(), return_when=asyncio.FIRST_COMPLETED)
            if not ends["vm"].done():
                await asyncio.wait([ends["vm"]], timeout=END_REASON_S)
            return next((name, end.result()) for name, end in ends.items() if end.done())
        finally:
            await cancel_all(*ends.values())

    async def virtiofsd_end(self) -> str:
        """Returns the reason once virtiofsd, which must have started, has ended."""
        virtiofsd = self._virtiofsd()
        assert virtiofsd is not None, "virtiofsd starts before the vm"
        return await self._cgroups.explain_virtiofsd(await virtiofsd.wait())

    async def _vm_end(self) -> str:
        return await self._cgroups.explain(await self._hypervisor.wait())

    async def _checks_end(self, agent: Agent) -> str:
        """Returns the reason once the agent is gone, or has failed MAX_FAILED_CHECKS checks in a row."""
        failed = 0
        while failed < MAX_FAILED_CHECKS:
            await asyncio.sleep(RETRY_PAUSE_S if failed else CHECK_PAUSE_S)
            try:
                await agent.check(TIMEOUT_S)
                failed = 0
            except AgentGone:
                return await agent.gone()
            except ShimError as exc:
                failed += 1
                self.failed_checks += 1
                reason = str(exc)
        return f"the agent has failed {MAX_FAILED_CHECKS} health checks in a row: {reason}"


async def _connection_end(agent: Agent) -> str:
    return f"the agent's connection ended: {await agent.gone()}"
