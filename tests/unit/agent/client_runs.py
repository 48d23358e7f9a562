"""How long the tests of the agent's client wait."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0
"""For whatever is expected to come."""


async def until(holds: Callable[[], object]) -> None:
    """`holds` is true; the test's own limit ends a wait in vain."""
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)
