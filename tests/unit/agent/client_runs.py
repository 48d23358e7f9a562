"""An agent client and its peer in one loop, whose clock only skips idle time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pyshim.agent.client import AgentClient
from pyshim.ttrpc import Client
from tests.fakes.agent import FakeAgent
from tests.fakes.clock import run_fast_forward

PATIENCE_S = 60.0
"""For whatever is expected to come."""


def run(
    body: Callable[[FakeAgent, AgentClient], Coroutine[Any, Any, None]], *, request_timeout_s: float = PATIENCE_S
) -> None:
    async def main() -> None:
        fake = FakeAgent()
        client = AgentClient(await Client.connect_socket(fake.connection()), request_timeout_s=request_timeout_s)
        try:
            await body(fake, client)
        finally:
            await client.close()
            await fake.close()

    run_loop(main())


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """All peers live in the loop: no deadline passes because the machine is busy."""

    async def guarded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await main

    run_fast_forward(guarded())


async def until(holds: Callable[[], object]) -> None:
    """`holds` is true; the limit of `run_loop` ends a wait in vain."""
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)
