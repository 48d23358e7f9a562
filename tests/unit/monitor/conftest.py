"""A monitor socket, and the pod behind it."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.unit.monitor.monitored import FakePod, served


@pytest.fixture
def monitor(runner: asyncio.Runner, tmp_path: Path) -> Iterator[tuple[str, FakePod]]:
    end = AsyncExitStack()
    yield runner.run(end.enter_async_context(served(tmp_path)))
    runner.run(end.aclose())


@pytest.fixture
def path(monitor: tuple[str, FakePod]) -> str:
    return monitor[0]


@pytest.fixture
def pod(monitor: tuple[str, FakePod]) -> FakePod:
    return monitor[1]
