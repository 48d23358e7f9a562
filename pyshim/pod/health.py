"""Health checks of the guest's agent, for VMs whose end no event reports.

A local VM ends with its process. A remote one may be gone while the connection to its agent stays, since that leads
through the service: calls then fail or are never answered.
"""

import asyncio

from pyshim.model.errors import AgentGone, ShimError
from pyshim.model.seams import Agent

EVERY_S = 30.0
"""Seconds between two checks: an idle pod is to cost next to nothing."""
AGAIN_S = 10.0
"""Seconds after a check that failed."""
TIMEOUT_S = 30.0
"""Kata's limit for this call."""
MISSES = 3
"""Failed checks in a row that end the sandbox; a busy guest or network may fail a few."""


class HealthChecks:
    """`missed` counts all checks that the agent did not pass."""

    def __init__(self) -> None:
        self.missed = 0

    async def unanswered(self, agent: Agent) -> str:
        """The reason of the loss, once the agent has failed so many checks in a row."""
        misses = 0
        while misses < MISSES:
            await asyncio.sleep(AGAIN_S if misses else EVERY_S)
            try:
                await agent.check(TIMEOUT_S)
                misses = 0
            except AgentGone:
                return await agent.gone()
            except ShimError as exc:
                misses += 1
                self.missed += 1
                reason = str(exc)
        return f"the agent has failed {MISSES} health checks in a row: {reason}"
