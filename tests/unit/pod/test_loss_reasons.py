"""Why a sandbox was lost: the cause is reported, not its consequence."""

import asyncio

import pytest

from pyshim.model.errors import Unavailable
from tests.unit.pod.conftest import Stack, scenario, until


@scenario
async def test_a_panic_during_boot_is_reported_even_when_virtiofsd_is_seen_to_end_first(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd exited 0")
    await asyncio.sleep(0.1)
    stack.hypervisors[0].die("guest panicked; last console lines: not syncing")

    with pytest.raises(Unavailable, match="guest panicked"):
        await creating


@scenario
async def test_virtiofsd_that_dies_alone_is_the_reported_reason(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd was killed")

    with pytest.raises(Unavailable, match="virtiofsd was killed"):
        await creating
