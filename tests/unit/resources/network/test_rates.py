"""How fast an interface of the pod may receive and send: kept by the kernel, on the tap and on the link."""

from __future__ import annotations

import os
import sys

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.config.values import MAX_LINK_RATE, MIN_LINK_RATE
from pyshim.model.errors import FailedPrecondition, Unimplemented
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from tests.fakes.namespaces import VNET_HEADER_BYTES, GuestStack
from tests.fakes.wire import HookedLedger, Wire, connect, mac

pytestmark = pytest.mark.root

SLOW = 80_000
"""bit/s: 200 datagrams of 1000 bytes would take 20 s, and the queue holds a third of them."""
_FLOOD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    for _ in range(200):
        client.sendto(bytes(1000), ("10.1.0.2", 9))
"""


def _rates(wire: Wire) -> dict[str, tuple[int, int]]:
    """Of each interface with a token bucket: bytes a second, and packets dropped by it."""
    shown = wire.pod.json("tc", "-s", "-j", "qdisc", "show")
    return {item["dev"]: (item["options"]["rate"], item["drops"]) for item in shown if item["kind"] == "tbf"}


@pytest.mark.parametrize(
    ("received", "sent", "expected"),
    [(SLOW, 0, {"veth0_kata": SLOW // 8}), (0, SLOW, {"eth0": SLOW // 8}), (0, 0, {})],
    ids=["received", "sent", "neither"],
)
async def test_only_what_is_limited_is_dropped_beyond_its_rate(
    wire: Wire, received: int, sent: int, expected: dict[str, int], connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()

    network = await connect(connector, wire.pod.path, HookedLedger(), received=received, sent=sent)
    (fd,) = network.nics[0].tap_fds
    with GuestStack((fd,), mac(1), "10.1.0.2"):
        wire.ping("10.1.0.2")
        wire.outside.run(sys.executable, "-I", "-S", "-c", _FLOOD)
    (peer,) = wire.outside.json("ip", "-j", "link", "show", "dev", "eth0-out")
    frame = bytes.fromhex((peer["address"] + mac(1)).replace(":", "")) + b"\x88\xb5" + bytes(1000)
    for _ in range(200):
        os.write(fd, bytes(VNET_HEADER_BYTES) + frame)

    found = _rates(wire)
    assert {name: rate for name, (rate, _) in found.items()} == expected
    assert all(drops > 0 for _, drops in found.values())
    await network.disconnect()

    assert wire.pod.state() == before


@pytest.mark.parametrize("rate", [MIN_LINK_RATE, MAX_LINK_RATE])
async def test_the_kernel_takes_the_least_and_the_most(wire: Wire, rate: int, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1, mtu=65521)

    network = await connect(connector, wire.pod.path, HookedLedger(), received=rate, sent=rate)
    assert [found for found, _ in _rates(wire).values()] == [rate // 8] * 2
    await network.disconnect()


async def test_a_limit_goes_by_the_ledger_alone_and_twice(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()
    ledger = HookedLedger()

    network = await connect(connector, wire.pod.path, ledger, sent=SLOW)
    network.close_taps()
    network.unwatch()
    assert network.forward_listener is not None
    await network.forward_listener.close()

    entries = tuple(ledger.held.values())
    assert ResourceKind.QDISC in {entry.kind for entry in entries}
    for _ in range(2):
        for entry in reversed(entries):
            undo_entry(entry)

    assert wire.pod.state() == before


async def test_an_interface_that_another_program_limits_is_refused_and_left_so(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.pod.run(*"tc qdisc add dev eth0 root handle 7: tbf rate 1mbit burst 10000 latency 50ms".split())
    before = wire.pod.state()

    with pytest.raises(FailedPrecondition, match=r"limit what link 'eth0' sends to 80000 bit/s .*EEXIST"):
        await connect(connector, wire.pod.path, HookedLedger(), sent=SLOW)

    assert wire.pod.state() == before


async def test_a_macvtap_limits_what_is_sent_and_refuses_to_limit_what_is_received(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()

    network = await connect(connector, wire.pod.path, HookedLedger(), model="macvtap", sent=SLOW)
    assert {name: rate for name, (rate, _) in _rates(wire).items()} == {"eth0": SLOW // 8}
    await network.disconnect()
    with pytest.raises(Unimplemented, match="'eth0' receives"):
        await connect(connector, wire.pod.path, HookedLedger(), model="macvtap", received=SLOW)

    assert wire.pod.state() == before


@pytest.mark.parametrize("entry_key", ["eth0", "no-such-link"])
def test_releasing_a_limit_that_was_never_made_is_no_error(wire: Wire, entry_key: str) -> None:
    wire.veth("eth0", 1)

    undo_entry(LedgerEntry(kind=ResourceKind.QDISC, key=entry_key, detail={"netns": wire.pod.path}))
