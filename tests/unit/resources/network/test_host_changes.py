"""Links that come and go in a pod's namespace that is wired already: real links, real frames, the kernel's own news."""

import asyncio
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.model.ledger import ResourceKind
from pyshim.model.network import NetworkModel, Wiring
from pyshim.model.vm import NicDevice
from pyshim.resources.network.host.namespace import make_netns
from pyshim.resources.network.host.pod_network import HostNetwork, HostNetworkConnector
from pyshim.resources.network.host.rtnetlink import is_news
from pyshim.resources.network.plan.network import OWN_NETNS
from tests.fakes.namespaces import GuestStack, Namespace
from tests.fakes.wire import HookedLedger, Wire, at, connect, mac

pytestmark = pytest.mark.root


async def follow(network: HostNetwork) -> tuple[tuple[NicDevice, ...], tuple[str, ...]]:
    """One look: the devices of new links, and the ids of those whose link is gone."""
    found = await network.follow()
    return found.added, found.gone


async def news(network: HostNetwork) -> None:
    async with asyncio.timeout(30):
        await network.changed()


async def is_quiet(network: HostNetwork) -> bool:
    """True when no event comes in a time in which the kernel reports every change."""
    try:
        async with asyncio.timeout(0.3):
            await network.changed()
    except TimeoutError:
        return True
    return False


async def test_a_link_that_comes_is_news_is_wired_and_carries_frames(
    wire: Wire, connector: HostNetworkConnector, children: Children
) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger)
    assert await is_quiet(network)  # our own wiring is no news
    assert children.alive == ()  # watching takes no process
    wire.veth("eth1", 2)
    wire.pod.run("ip", "route", "add", "10.77.0.0/16", "via", "10.2.0.1")
    await news(network)

    (nic,), gone = await follow(network)

    assert (nic.id, nic.mac, gone) == ("network-1", mac(2), ())
    assert [item.name for item in network.interfaces] == ["eth0", "eth1"]
    assert [item.destination for item in network.routes] == ["10.77.0.0/16"]
    assert [item.id for item in network.nics] == ["network-0", "network-1"]
    with GuestStack(nic.tap_fds, mac(2), "10.2.0.2"):
        wire.ping("10.2.0.2")
    assert await is_quiet(network)  # nor is what came of it
    await network.disconnect()
    assert ledger.held == {}
    with pytest.raises(Unavailable):
        await network.changed()

    wire.pod.run("ip", "link", "delete", "eth1")
    assert wire.pod.state() == before


async def test_a_pod_whose_network_is_set_up_after_its_sandbox_gets_all_of_it(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    network = await connect(connector, wire.pod.path, HookedLedger())
    assert network.nics == ()
    wire.veth("eth0", 1)
    await news(network)

    (nic,), _ = await follow(network)

    assert (nic.id, [item.name for item in network.interfaces]) == ("network-0", ["eth0"])
    await network.disconnect()


async def test_a_link_that_goes_is_reported_and_dropped_and_one_made_anew_is_another(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger)
    wire.pod.run("ip", "link", "delete", "eth0")
    await news(network)
    assert await follow(network) == ((), ("network-0",))
    assert (network.nics, network.interfaces, network.routes) == ((), (), ())
    wire.veth("eth0", 1)
    (nic,), _ = await follow(network)
    assert nic.id == "network-1"

    await network.detach("network-0")
    await network.detach("network-0")

    # The ingress qdisc of the new eth0 is not the old one's.
    assert {(entry.kind, entry.key) for entry in ledger.held.values()} == {
        (ResourceKind.LINK, "veth1_kata"),
        (ResourceKind.INGRESS, "eth0"),
    }
    with GuestStack(nic.tap_fds, mac(1), "10.1.0.2"):
        wire.ping("10.1.0.2")
    await network.disconnect()
    assert ledger.held == {}


async def test_a_renamed_link_is_undone_by_its_new_name(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger)
    wire.pod.run("ip", "link", "set", "eth0", "down")
    wire.pod.run("ip", "link", "set", "eth0", "name", "net7")
    wire.pod.run("ip", "link", "set", "net7", "up")
    assert await follow(network) == ((), ())
    assert [item.name for item in network.interfaces] == ["net7"]
    await network.disconnect()
    assert ledger.held == {}

    assert "ingress" not in wire.pod.run("tc", "qdisc", "show")


@pytest.mark.parametrize("key", ["eth1", "veth1_kata"])
async def test_a_link_that_vanishes_while_it_is_wired_leaves_nothing_and_the_others_are_wired(
    wire: Wire, key: str, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    ledger = HookedLedger(at(key, lambda: wire.pod.run("ip", "link", "delete", "eth1") and None))
    network = await connect(connector, wire.pod.path, ledger)
    wire.veth("eth1", 2)
    wire.veth("eth2", 3)

    (nic,), gone = await follow(network)

    assert (nic.mac, gone) == (mac(3), ())
    assert [item.name for item in network.interfaces] == ["eth0", "eth2"]
    assert {entry.key for entry in ledger.held.values()} == {"veth0_kata", "eth0", "veth2_kata", "eth2"}
    await network.disconnect()
    assert ledger.held == {}


async def test_a_look_given_up_half_way_leaves_nothing_wired_and_the_next_one_finds_all_of_it(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    looks: list[asyncio.Task[object]] = []

    def give_up() -> None:
        if len(looks) == 1:
            looks[0].cancel()

    ledger = HookedLedger(at("eth1", give_up))
    network = await connect(connector, wire.pod.path, ledger)
    wire.veth("eth1", 2)
    wire.pod.run("ip", "link", "delete", "eth0")
    looks.append(asyncio.ensure_future(network.follow()))
    await asyncio.wait(looks)
    assert looks[0].cancelled()
    assert {entry.key for entry in ledger.held.values()} == {"veth0_kata", "eth0"}

    looks.clear()
    (nic,), gone = await follow(network)

    assert (nic.mac, gone) == (mac(2), ("network-0",))
    with GuestStack(nic.tap_fds, mac(2), "10.2.0.2"):
        wire.ping("10.2.0.2")
    await network.disconnect()
    assert ledger.held == {}


def everything_of(link: str, pod: Namespace) -> tuple[str, str, set[str]]:
    names = {item["ifname"] for item in pod.json("ip", "-j", "link")} - {"veth0_kata"}
    return pod.run("tc", "qdisc", "show", "dev", link), pod.run("ip", "-o", "-4", "address", "show", "dev", link), names


async def test_dropping_what_cannot_be_plugged_leaves_its_link_as_it_was(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    network = await connect(connector, wire.pod.path, HookedLedger(), received=8_000_000, sent=8_000_000)
    wire.veth("eth1", 2)
    before = everything_of("eth1", wire.pod)
    (nic,), _ = await follow(network)
    assert everything_of("eth1", wire.pod) != before

    network.close_taps()
    await network.detach(nic.id)

    assert everything_of("eth1", wire.pod) == before
    assert [item.name for item in network.interfaces] == ["eth0"]
    assert await is_quiet(network)  # else what cannot be plugged would be tried again for ever
    (again,), _ = await follow(network)
    assert (again.id, again.mac) == ("network-2", mac(2))
    await network.disconnect()


async def test_a_path_that_leads_to_another_namespace_by_now_is_not_entered(
    wire: Wire, tmp_path: object, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    link = f"{tmp_path}/netns"
    os.symlink(wire.pod.path, link)

    network = await connect(connector, link, HookedLedger())
    os.unlink(link)
    with pytest.raises(NotFound):
        await network.follow()
    os.symlink(wire.outside.path, link)
    with pytest.raises(FailedPrecondition, match="another one is at this path"):
        await network.follow()
    os.unlink(link)
    os.symlink(wire.pod.path, link)
    await network.disconnect()


async def test_news_of_a_neighbour_in_the_namespace_is_not_believed(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    """Any process of the pod's namespace may send to a route socket there."""
    wire.veth("eth0", 1)
    forge = (
        "import socket, struct\n"
        "rows = [line.split() for line in open('/proc/net/netlink').readlines()[1:]]\n"
        "ports = [int(row[2]) for row in rows if row[1] == '0']\n"
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\n"
        "for port in ports:\n"
        "    if port:\n"
        "        try: s.sendto(struct.pack('=IHHII', 16, 17, 0, 0, 0), (port, 0)); print('sent')\n"
        "        except OSError as error: print(error)\n"
    )

    network = await connect(connector, wire.pod.path, HookedLedger())
    assert "sent" in wire.pod.run("python3", "-c", forge)
    assert await is_quiet(network)
    await network.disconnect()


def header(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def link_message(name: str) -> bytes:
    attributes = struct.pack("=HHI", 8, 38, 0), struct.pack("=HH", 5 + len(name), 3) + name.encode() + b"\0"
    return header(17, bytes(16) + b"".join(attributes))


def address_message(kind: int, scope: int) -> bytes:
    return header(kind, struct.pack("=BBBBi", 2, 24, 0, scope, 3))


def route_message(kind: int, *, table: int = 254, protocol: int = 4, route_type: int = 1) -> bytes:
    return header(kind, struct.pack("=BBBBBBBBI", 2, 16, 0, 0, table, protocol, 0, route_type, 0))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", False),
        (b"\x05\0\0\0", False),
        (struct.pack("=IHHII", 3, 17, 0, 0, 0), False),  # a length no message has
        (header(16, bytes(16)), False),  # RTM_NEWLINK: nothing until it has an address
        (header(17, bytes(16)), True),  # RTM_DELLINK
        (link_message("eth1"), True),
        (link_message("veth1_kata"), False),  # ours, which goes when its link could not be connected
        (link_message("veth1_kata2"), True),
        (header(17, bytes(16) + b"\0\0\3\0"), True),  # an attribute of a length none has
        (address_message(20, 0), True),
        (address_message(21, 0), True),
        (address_message(20, 253), False),  # link-local: the guest's kernel makes its own
        (address_message(20, 254), False),
        (header(20, b"\2"), False),
        (route_message(24), True),
        (route_message(25), True),
        (route_message(24, protocol=2), False),  # the kernel's own
        (route_message(24, table=255), False),
        (route_message(24, route_type=6), False),
        (header(28, bytes(12)), False),  # RTM_NEWNEIGH
        (header(16, bytes(15)) + b"\0" + address_message(20, 0), True),  # padded, and not the first
    ],
)
def test_only_changes_that_the_guest_is_told_of_are_news(data: bytes, expected: bool) -> None:
    assert is_news(data) is expected


@pytest.fixture
def own_netns() -> Iterator[str]:
    """The path of a namespace that a shim makes for a sandbox, which bears this process's number."""
    path = f"{OWN_NETNS}test-{os.getpid()}"
    make_netns(path)
    yield path
    syscalls.umount2(path, syscalls.MNT_DETACH)
    os.unlink(path)


async def test_links_that_a_caller_puts_into_our_own_namespace_are_known_at_once(
    own_netns: str, connector: HostNetworkConnector, children: Children
) -> None:
    """Docker takes the task's namespace after Create, and calls Start when its interface is there."""
    wiring = Wiring(model=NetworkModel.TCFILTER, queues=1, vhost_net=False)
    network = await connector.connect_new(own_netns, wiring, HookedLedger())
    assert (network.is_changed(), children.alive) == (False, ())

    ip("-n", Path(own_netns).name, "link", "add", "eth0", "type", "veth", "peer", "name", "other")
    ip("-n", Path(own_netns).name, "address", "add", "10.3.0.2/24", "dev", "eth0")

    assert network.is_changed()
    assert not network.is_changed()
    (nic,), gone = await follow(network)
    assert (nic.id, gone) == ("network-0", ())
    network.close_taps()
    await network.disconnect()


async def test_the_namespace_of_another_sandbox_is_refused_by_its_name(
    own_netns: str, connector: HostNetworkConnector
) -> None:
    """Docker's `--network container:OTHER` leads there by the pid of the other one's task."""
    reason = rf"that of sandbox '{own_netns.removeprefix(OWN_NETNS)}', and two VMs cannot share one"
    with OwnedFd(os.open(own_netns, os.O_RDONLY)) as other, pytest.raises(FailedPrecondition, match=reason):
        await connect(connector, f"/proc/self/fd/{other.fileno()}", HookedLedger())


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
