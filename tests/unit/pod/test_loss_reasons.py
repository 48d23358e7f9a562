"""The reason of a sandbox's loss is its cause, not a consequence."""

import asyncio

import pytest

from pyshim.model.errors import FailedPrecondition, Unavailable
from tests.unit.pod.conftest import Stack, until


async def test_a_panic_during_boot_is_reported_even_when_virtiofsd_is_seen_to_end_first(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd exited 0")
    await asyncio.sleep(0.1)
    stack.hypervisors[0].die("guest panicked; last console lines: not syncing")

    with pytest.raises(Unavailable, match="guest panicked"):
        await creating


async def test_virtiofsd_that_dies_alone_is_the_reported_reason(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd was killed")

    with pytest.raises(Unavailable, match="virtiofsd was killed"):
        await creating


@pytest.mark.parametrize(
    ("socket", "reason"),
    [
        ("/run/vc/vm/c1/vhost-fs.sock", "start vm 'c1': virtiofsd exited 1"),
        ("/other", "connect '/other'"),
    ],
)
async def test_a_vmm_that_misses_virtiofsds_socket_is_not_blamed(stack: Stack, socket: str, reason: str) -> None:
    """virtiofsd ends at once, for instance where it cannot make its sandbox; the VMM then cannot connect `socket`."""

    def hit(step: str) -> None:
        if step == "create_vm":
            next(iter(stack.host.daemons)).ended.set_result("virtiofsd exited 1")
            raise FailedPrecondition(f"connect '{socket}'")

    stack.host.faults.hit = hit  # type: ignore[method-assign]

    with pytest.raises(FailedPrecondition) as caught:
        await stack.create("c1", ["sleep"])

    assert str(caught.value) == reason
