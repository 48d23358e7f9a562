"""An agent client and its peer in one loop, whose clock only skips idle time."""

import asyncio
from collections.abc import Iterator

import pytest

from pyshim.agent.client import AgentClient
from pyshim.ttrpc import Client
from tests.fakes.agent import FakeAgent

from .client_runs import PATIENCE_S


@pytest.fixture
def fake(fast_clock: None, runner: asyncio.Runner) -> Iterator[FakeAgent]:
    fake = FakeAgent()
    yield fake
    runner.run(fake.close())


@pytest.fixture
def request_timeout_s() -> float:
    return PATIENCE_S


@pytest.fixture
def client(fake: FakeAgent, runner: asyncio.Runner, request_timeout_s: float) -> Iterator[AgentClient]:
    async def connected() -> AgentClient:
        return AgentClient(Client(fake.connection()), request_timeout_s=request_timeout_s)

    client = runner.run(connected())
    yield client
    runner.run(client.close())
