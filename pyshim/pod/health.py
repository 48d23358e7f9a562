"""Health checks of the guest's agent, for VMs whose end no event reports.

A local VM ends with its process. A remote one may be gone while the connection to its agent stays, since that goes
through the service. Calls then fail or get no answer.
"""

import asyncio

from pyshim.model.errors import AgentGone, ShimError
from pyshim.model.seams import Agent

CHECK_PAUSE_S = 30.0
"""Seconds between two checks, so that an idle pod costs next to nothing."""
RETRY_PAUSE_S = 10.0
"""Seconds from a failed check to the next one."""
TIMEOUT_S = 30.0
"""Kata's limit for this call."""
MAX_FAILED_CHECKS = 3
"""Failed checks in a row after which the sandbox is lost: a busy guest or network may fail some."""


class HealthChecks:
    def __init__(self) -> None:
        self.failed_checks = 0
        """All failed checks, for the metrics."""

    async def loss(self, agent: Agent) -> str:
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
