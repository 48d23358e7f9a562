"""A monitor of a scripted QEMU."""

import asyncio
from collections.abc import Awaitable, Callable

from hypervisors.qemu.qmp import Monitor, QmpEvent
from tests.fakes.clock import run_fast_forward
from tests.fakes.open_files import same_open_files
from tests.fakes.qmp_peer import Answer, QmpPeer


def run(scenario: Callable[[], Awaitable[None]], *, limit_s: float = 60) -> None:
    """On a loop of its own, in which the scripted peer lives too; afterwards no task and no descriptor is left."""
    run_fast_forward(_alone(scenario, limit_s), debug=True)


def run_with_qemu(scenario: Callable[[], Awaitable[None]]) -> None:
    """As `run`, by the clock on the wall."""
    asyncio.run(_alone(scenario), debug=True)


async def _alone(scenario: Callable[[], Awaitable[None]], limit_s: float = 60) -> None:
    with same_open_files():
        async with asyncio.timeout(limit_s):
            await scenario()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


class Session:
    """A monitor on a scripted peer."""

    def __init__(self, answers: dict[str, Answer] | None = None, *, greeting: bytes | None = None) -> None:
        self.events: list[QmpEvent] = []
        self.peer = QmpPeer(answers, greeting=greeting)
        self.monitor = Monitor(name="vm1", on_event=self.events.append)

    async def __aenter__(self) -> "Session":
        await self.monitor.connect(self.peer.client, 5)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.monitor.close()
        await self.peer.close()
