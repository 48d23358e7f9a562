"""Health checks of the guest's agent, for VMs whose end no event reports.

A local VM ends with its process. A remote one may be gone while the connection to its agent stays, since that leads
through the service: calls then fail or are never answered.
"""

import asyncio

from pyshim.model.errors import AgentGone, ShimError
from pyshim.model.seams import Agent

CHECK_PAUSE_S = 30.0
"""Seconds between two checks: an idle pod is to cost next to nothing."""
RETRY_PAUSE_S = 10.0
"""Seconds after a check that failed."""
TIMEOUT_S = 30.0
"""Kata's limit for this call."""
MAX_FAILED_CHECKS = 3
"""Failed checks in a row that end the sandbox; a busy guest or network may fail a few."""


class HealthChecks:
    """`failed_checks` counts all checks that the agent did not pass."""

    def __init__(self) -> None:
        self.failed_checks = 0

    async def loss(self, agent: Agent) -> str:
        """The reason of the loss, once the agent has failed so many checks in a row."""
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
