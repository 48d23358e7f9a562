"""A pod's network undone: by disconnect, by the ledger alone, and after a failure at any step of the wiring."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from pyshim.cleanup.release import release
from pyshim.host.processes.children import Children
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
)
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.network.host.connector import HostNetworkConnector
from pyshim.resources.network.host.session import PodNamespace
from tests.fakes.ledger import FakeLedger
from tests.fakes.wire import HookedLedger, Wire, at, connect

pytestmark = pytest.mark.root


async def refused_with_nothing_left(
    wire: Wire,
    before: object,
    error: type[Exception],
    match: str,
    ledger: HookedLedger,
    connector: HostNetworkConnector,
) -> None:
    """Connecting raises that; the ledger is empty again and the pod's namespace in the state `before`."""
    with pytest.raises(error, match=match):
        await connect(connector, wire.pod.path, ledger)
    assert ledger.held == {}
    assert wire.pod.state() == before


async def test_disconnect_twice_and_after_the_namespace_is_gone(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger)
    network.close_taps()
    wire.pod.close()
    await network.disconnect()
    await network.disconnect()
    network.close_taps()
    assert ledger.held == {}


async def test_the_taps_go_with_their_descriptors_and_the_ledger_alone_undoes_the_rest(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    """The undo of `delete` after the shim was killed: nothing but the entries, no live object."""
    wire.veth("eth0", 1)
    before = wire.pod.state()
    ledger = HookedLedger()

    network = await connect(connector, wire.pod.path, ledger)
    network.close_taps()
    network.unwatch()
    assert network.forward_listener is not None
    await network.forward_listener.close()

    assert wire.pod.state() != before
    assert {entry.detail["netns_inode"] for entry in ledger.held.values()} == {os.stat(wire.pod.path).st_ino}
    for entry in reversed(tuple(ledger.held.values())):
        release(entry)

    assert wire.pod.state() == before


@pytest.mark.parametrize("full_after", [0, 1, 2, 3])
async def test_nothing_is_left_when_the_ledger_cannot_be_written(
    wire: Wire, connector: HostNetworkConnector, full_after: int
) -> None:
    wire.veth("eth0", 1)
    wire.veth("eth1", 2)
    before = wire.pod.state()

    ledger = HookedLedger(full_after=full_after)
    await refused_with_nothing_left(wire, before, FailedPrecondition, "ENOSPC", ledger, connector)


@pytest.mark.parametrize("key", ["veth0_kata", "eth0", "veth1_kata", "eth1"])
async def test_nothing_is_left_when_the_child_dies_at_any_step(
    wire: Wire, connector: HostNetworkConnector, children: Children, key: str
) -> None:
    wire.veth("eth0", 1)
    wire.veth("eth1", 2)
    before = wire.pod.state()

    killing = HookedLedger(at(key, lambda: children.alive[0].kill() and None))
    await refused_with_nothing_left(wire, before, Internal, "was killed by SIGKILL", killing, connector)


@pytest.mark.parametrize("key", ["veth0_kata", "eth0", "veth1_kata", "eth1"])
async def test_nothing_is_left_when_the_caller_gives_up_at_any_step(
    wire: Wire, key: str, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.veth("eth1", 2)
    before = wire.pod.state()

    ledger = HookedLedger(at(key, lambda: task.cancel() and None))
    task = asyncio.ensure_future(connect(connector, wire.pod.path, ledger))
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert ledger.held == {}

    assert wire.pod.state() == before


async def test_the_child_has_ended_before_the_undo_when_the_caller_gives_up_while_it_ends(
    wire: Wire, children: Children
) -> None:
    """A quick child has answered every question by the time the cancellation arrives."""
    alive: list[object] = []

    async def undo() -> None:
        alive.append(children.alive)

    async def look() -> None:
        async with PodNamespace(children, wire.pod.path, 60.0).session(undo):
            caller.cancel()

    caller = asyncio.ensure_future(look())
    with suppress(asyncio.CancelledError):
        await caller
    assert caller.cancelled()

    assert alive == [()]


@pytest.mark.parametrize("key", ["eth1"])
async def test_a_child_that_hangs_ends_at_the_deadline(wire: Wire, children: Children, key: str) -> None:
    wire.veth("eth0", 1)
    wire.veth("eth1", 2)
    before = wire.pod.state()

    stopping = HookedLedger(at(key, lambda: children.alive[0].kill(signal.SIGSTOP) and None))
    connector = HostNetworkConnector(children=children, timeout_s=2.0)
    await refused_with_nothing_left(wire, before, DeadlineExceeded, wire.pod.path, stopping, connector)


async def test_a_link_that_vanishes_after_the_scan_fails_by_name_and_leaves_nothing(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()
    wire.veth("eth1", 2)

    deleting = HookedLedger(at("eth1", lambda: wire.pod.run("ip", "link", "delete", "eth1") and None))

    text = r"redirect link 'eth1' to tap 'veth1_kata'.*ENODEV"
    await refused_with_nothing_left(wire, before, FailedPrecondition, text, deleting, connector)


async def test_an_mtu_no_tap_can_have_is_refused_by_name_and_leaves_nothing(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.veth("eth1", 2, mtu=65535)
    before = wire.pod.state()

    text = r"make tap 'veth1_kata' for link 'eth1'.*EINVAL"
    await refused_with_nothing_left(wire, before, FailedPrecondition, text, HookedLedger(), connector)


async def test_a_failing_undo_is_tried_again_by_the_next_disconnect(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()
    broken = True

    def undo(entry: LedgerEntry) -> None:
        if broken and entry.kind is ResourceKind.INGRESS:
            raise FailedPrecondition("release ingress 'eth0': EBUSY")
        release(entry)

    ledger = FakeLedger(undo)
    network = await connect(connector, wire.pod.path, ledger)
    with pytest.raises(FailedPrecondition, match="EBUSY"):
        await network.disconnect()
    assert [entry.kind for entry in ledger.held.values()] == [ResourceKind.INGRESS]
    broken = False
    await network.disconnect()
    assert ledger.held == {}

    assert wire.pod.state() == before
