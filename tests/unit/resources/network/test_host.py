"""A pod's network wired for real and undone: namespaces, links of every kind and taps, frames through them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted

from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.host.python_child import MAX_FDS
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound, ShimError
from pyshim.model.guest import NetworkAddress
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.network.host import child
from pyshim.resources.network.host.namespace import PodNamespace
from pyshim.resources.network.host.pod_network import HostNetwork, HostNetworkConnector
from tests.fakes.ledger import FakeLedger
from tests.fakes.namespaces import GuestStack
from tests.fakes.wire import HookedLedger, Wire, at, connect, mac

pytestmark = pytest.mark.root


async def test_the_guest_is_told_what_the_plugin_set_and_frames_pass_both_ways(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1, mtu=1400)
    wire.pod.run("ip", "address", "add", "fd00:1::2/64", "dev", "eth0", "nodad")
    wire.pod.run("ip", "route", "add", "default", "via", "10.1.0.1")
    wire.pod.run("ip", "route", "add", "192.168.7.0/24", "dev", "eth0", "scope", "link", "mtu", "1300")
    wire.pod.run("ip", "route", "add", "10.99.0.0/16", "via", "172.31.0.1", "dev", "eth0", "onlink")
    wire.pod.run("ip", "-6", "route", "add", "default", "via", "fd00:1::1")
    wire.pod.run("ip", "route", "add", "blackhole", "10.66.0.0/16")
    wire.pod.run("ip", "neigh", "add", "10.1.0.9", "lladdr", mac(9), "dev", "eth0", "nud", "permanent")
    before = wire.pod.state()

    network = await connect(connector, wire.pod.path, HookedLedger())
    (nic,) = network.nics
    assert (nic.mac, nic.mtu, len(nic.tap_fds)) == (mac(1), 1400, 1)
    (interface,) = network.interfaces
    assert (interface.name, interface.mtu, interface.mac) == ("eth0", 1400, mac(1))
    assert interface.addresses == (
        NetworkAddress(address="10.1.0.2", prefix_length=24),
        NetworkAddress(address="fd00:1::2", prefix_length=64),
    )
    routes = {(item.destination, item.gateway, item.family, item.mtu, item.flags) for item in network.routes}
    assert routes == {
        ("", "10.1.0.1", 4, 0, 0),
        ("192.168.7.0/24", "", 4, 1300, 0),
        ("10.99.0.0/16", "172.31.0.1", 4, 0, 4),
        ("", "fd00:1::1", 6, 0, 0),
    }
    assert [(item.address, item.mac, item.state) for item in network.neighbours] == [("10.1.0.9", mac(9), 0x80)]
    with GuestStack(nic.tap_fds, nic.mac, "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
        # 1400 bytes of IP: as large as the MTU allows, and not one fragment.
        wire.ping("10.1.0.2", payload_bytes=1372)
    # `ping` ends with an error when no reply comes; on a busy machine the kernel may drop one of several.
    assert guest.largest_bytes == 1414
    await network.disconnect()

    assert wire.pod.state() == before


async def test_more_queues_than_one_message_can_pass_are_as_many_as_it_can(
    wire: Wire, connector: HostNetworkConnector, caplog: pytest.LogCaptureFixture
) -> None:
    wire.veth("eth0", 1)

    network = await connect(connector, wire.pod.path, HookedLedger(), queues=MAX_FDS + 1)
    queues = len(network.nics[0].tap_fds)
    await network.disconnect()

    assert queues == MAX_FDS
    assert "queues limited" in caplog.text


async def test_the_tap_says_nothing_to_the_guest_that_did_not_come_over_the_link(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    network = await connect(connector, wire.pod.path, HookedLedger())
    (tap,) = [link for link in wire.pod.json("ip", "-j", "address") if link["ifname"] == "veth0_kata"]
    assert tap["addr_info"] == []
    tap_mac = bytes.fromhex(tap["address"].replace(":", ""))
    with GuestStack(network.nics[0].tap_fds, mac(1), "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
    assert [frame for frame in guest.strangers if frame[6:12] == tap_mac] == []
    await network.disconnect()


async def test_two_links_with_several_queues_do_not_mix(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)
    wire.veth("net1", 2, mtu=9000)
    before = wire.pod.state()

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger, queues=3)
    assert [(nic.id, nic.mac, nic.mtu, len(nic.tap_fds)) for nic in network.nics] == [
        ("network-0", mac(1), 1500, 3),
        ("network-1", mac(2), 9000, 3),
    ]
    taps = [link for link in wire.pod.json("ip", "-d", "-j", "link") if link["ifname"].endswith("_kata")]
    assert [(tap["ifname"], tap["mtu"]) for tap in taps] == [("veth0_kata", 1500), ("veth1_kata", 9000)]
    assert all(tap["linkinfo"]["info_data"]["multi_queue"] for tap in taps)
    first = GuestStack(network.nics[0].tap_fds, mac(1), "10.1.0.2")
    second = GuestStack(network.nics[1].tap_fds, mac(2), "10.2.0.2")
    with first, second:
        wire.ping("10.1.0.2")
        wire.ping("10.2.0.2", payload_bytes=8900)
    assert min(first.echoes, second.echoes) > 0
    written = [(entry.key, entry.detail.get("index", 0)) for _, entry in ledger.history]
    index = {link["ifname"]: link["ifindex"] for link in wire.pod.json("ip", "-j", "link")}
    assert written == [
        *(("veth0_kata", 0), ("veth0_kata", index["veth0_kata"]), ("eth0", index["eth0"])),
        *(("veth1_kata", 0), ("veth1_kata", index["veth1_kata"]), ("net1", index["net1"])),
    ]
    await network.disconnect()
    assert ledger.held == {}

    assert wire.pod.state() == before


def make_macvlan(wire: Wire, kind: str) -> None:
    wire.outside.run("ip", "link", "add", "low0", "type", "veth", "peer", "name", "far0")
    wire.outside.run("ip", "link", "set", "low0", "up")
    wire.outside.run(
        *("ip", "link", "add", "link", "low0", "name", "net0", "netns", str(wire.pod.pid), "type", kind),
        *(("mode", "bridge") if kind != "ipvlan" else ("mode", "l2")),
    )
    wire.address(wire.outside, "far0", "10.1.0.1/24")
    wire.address(wire.pod, "net0", "10.1.0.2/24")


def make_bridge(wire: Wire, kind: str) -> None:
    wire.veth("port0", 7)
    wire.pod.run("ip", "address", "flush", "dev", "port0")
    wire.pod.run("sysctl", "-qw", "net.ipv6.conf.port0.disable_ipv6=1")
    wire.pod.run("ip", "link", "add", "net0", "type", kind)
    wire.pod.run("ip", "link", "set", "port0", "master", "net0")
    wire.address(wire.outside, "port0-out", "10.1.0.1/24")
    wire.address(wire.pod, "net0", "10.1.0.2/24")


def make_vlan(wire: Wire, kind: str) -> None:
    wire.veth("port0", 7)
    wire.pod.run("ip", "address", "flush", "dev", "port0")
    for namespace, parent, address in ((wire.outside, "port0-out", "10.1.0.1/24"), (wire.pod, "port0", "10.1.0.2/24")):
        namespace.run("ip", "link", "add", "link", parent, "name", "net0", "type", kind, "id", "5")
        wire.address(namespace, "net0", address)
    wire.pod.run("sysctl", "-qw", "net.ipv6.conf.port0.disable_ipv6=1")


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("macvlan", make_macvlan),
        ("macvtap", make_macvlan),
        ("ipvlan", make_macvlan),
        ("bridge", make_bridge),
        ("vlan", make_vlan),
    ],
)
async def test_frames_pass_whatever_the_kind_of_link(
    wire: Wire, kind: str, make: Callable[[Wire, str], None], connector: HostNetworkConnector
) -> None:
    words = f"ip link add probe0 type veth peer name probe1 && ip link add link probe0 name probe2 type {kind}"
    words += " id 5" if kind == "vlan" else ""
    probe = subprocess.run(["unshare", "--net", "sh", "-c", words], capture_output=True, text=True, check=False)
    if "Unknown device type" in probe.stderr:
        pytest.skip(f"this kernel has no {kind} links")
    make(wire, kind)
    before = wire.pod.state()

    network = await connect(connector, wire.pod.path, HookedLedger())
    (nic,) = network.nics
    assert network.interfaces[0].type == kind
    with GuestStack(nic.tap_fds, nic.mac, "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
    assert guest.echoes
    await network.disconnect()

    assert wire.pod.state() == before


async def test_a_namespace_with_only_loopback_gives_no_devices_and_no_error(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger)
    assert (network.nics, network.interfaces, network.routes) == ((), (), ())
    assert ledger.history == []
    await network.disconnect()


async def test_two_sandboxes_cannot_share_a_namespace_and_the_first_keeps_it(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    first = await connect(connector, wire.pod.path, HookedLedger())
    second_ledger = HookedLedger()
    with pytest.raises(FailedPrecondition, match="'eth0': it has an ingress qdisc already"):
        await connect(connector, wire.pod.path, second_ledger)
    assert second_ledger.history == []
    with GuestStack(first.nics[0].tap_fds, mac(1), "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
    assert guest.echoes
    await first.disconnect()


async def test_of_two_sandboxes_at_once_one_is_told_that_another_is_there(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)

    outcomes = await asyncio.gather(
        *(connect(connector, wire.pod.path, HookedLedger()) for _ in range(2)), return_exceptions=True
    )
    connected = [item for item in outcomes if isinstance(item, HostNetwork)]
    (refusal,) = [item for item in outcomes if not isinstance(item, HostNetwork)]
    assert len(connected) == 1
    assert isinstance(refusal, FailedPrecondition)
    # Refused before it looked: half-made wiring of the first must not be found, let alone undone.
    assert "lock network namespace" in str(refusal)
    with GuestStack(connected[0].nics[0].tap_fds, mac(1), "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
    assert guest.echoes
    await connected[0].disconnect()


async def test_paths_that_are_no_pod_namespace_are_refused_by_name(
    tmp_path: Path, connector: HostNetworkConnector
) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    cases: list[tuple[str, type[ShimError], str]] = [
        (f"{tmp_path}/missing", NotFound, "ENOENT"),
        (f"{tmp_path}/file/below", NotFound, "ENOTDIR"),
        (f"{tmp_path}/loop", InvalidArgument, "ELOOP"),
        (f"{tmp_path}/file", InvalidArgument, "not a network namespace"),
        (f"{tmp_path}/fifo", InvalidArgument, "not a network namespace"),
        (f"{tmp_path}", InvalidArgument, "not a network namespace"),
        ("/proc/self/ns/mnt", InvalidArgument, "not a network namespace"),
        ("/run/netns/a\0b", InvalidArgument, "null"),
        ("", NotFound, "ENOENT"),
    ]

    for path, error, words in cases:
        with pytest.raises(error) as caught:
            await connect(connector, path, HookedLedger())
        assert words in str(caught.value)
        assert repr(path) in str(caught.value)


async def test_the_hosts_namespace_is_refused_by_what_it_means(connector: HostNetworkConnector) -> None:
    """CRI-O pins it under another name at each attempt: with the path, events of one refusal would not merge."""
    with pytest.raises(InvalidArgument, match="it is the host's, and a VM cannot") as caught:
        await connect(connector, "/proc/self/ns/net", HookedLedger())

    assert "/proc" not in str(caught.value)


def test_the_shim_never_loads_pyroute2() -> None:
    program = (
        "import sys, pyshim.resources.network.host.pod_network; "
        "print(sorted(m for m in sys.modules if m.startswith('pyroute2')))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("a\"b'c,d=e;f", "tcfilter"),
        ("日本", "tcfilter"),
        ("-eth0", "tcfilter"),
        ("veth0_kata", "tcfilter"),
        ("s{0}$x", "macvtap"),
    ],
)
async def test_a_link_is_wired_and_undone_whatever_its_name(
    wire: Wire, name: str, model: str, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.pod.run("ip", "link", "set", "eth0", "down")
    wire.pod.run("ip", "link", "set", "dev", "eth0", "name", name)
    wire.pod.run("ip", "link", "set", "dev", name, "up")
    before = wire.pod.state()

    ledger = HookedLedger()
    network = await connect(connector, wire.pod.path, ledger, model=model)
    assert [interface.name for interface in network.interfaces] == [name]
    with GuestStack(network.nics[0].tap_fds, mac(1), "10.1.0.2"):
        wire.ping("10.1.0.2")
    await network.disconnect()
    assert ledger.held == {}

    assert wire.pod.state() == before


async def test_a_link_no_guest_can_be_told_of_is_refused_by_name(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)
    wire.pod.run("ip", "link", "set", "eth0", "down")
    wire.pod.run("ip", "link", "set", "dev", "eth0", "name", "a\x01b")
    wire.pod.run("ip", "link", "set", "dev", "a\x01b", "up")

    with pytest.raises(InvalidArgument, match=r"connect link 'a\\x01b'"):
        await connect(connector, wire.pod.path, HookedLedger())


def test_a_dump_that_was_disturbed_is_asked_for_again_and_the_last_one_is_an_error() -> None:
    def disturbed(times: int) -> Iterator[int]:
        asked.append(times)
        yield 1
        if len(asked) <= times:
            raise NetlinkDumpInterrupted
        yield 2

    asked: list[int] = []
    assert child._dump(lambda: disturbed(4)) == (1, 2)
    assert len(asked) == 5
    asked.clear()
    with pytest.raises(NetlinkDumpInterrupted):
        child._dump(lambda: disturbed(5))


async def test_links_that_come_and_go_during_a_scan_neither_fail_it_nor_hide_the_others(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    churn = (
        "import subprocess\n"
        "while True:\n"
        "    for words in ('add churn type veth peer name churn2', 'set churn up', 'del churn'):\n"
        "        subprocess.run(['ip', 'link', *words.split()], stderr=subprocess.DEVNULL)\n"
    )
    disturbing = subprocess.Popen(["nsenter", f"--net={wire.pod.path}", sys.executable, "-c", churn])

    try:
        for _ in range(5):
            ledger = HookedLedger()
            network = await connect(connector, wire.pod.path, ledger)
            assert "eth0" in [interface.name for interface in network.interfaces]
            await network.disconnect()
            assert ledger.held == {}
    finally:
        disturbing.kill()
        disturbing.wait()


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
        undo_entry(entry)

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
        undo_entry(entry)

    ledger = FakeLedger(undo)
    network = await connect(connector, wire.pod.path, ledger)
    with pytest.raises(FailedPrecondition, match="EBUSY"):
        await network.disconnect()
    assert [entry.kind for entry in ledger.held.values()] == [ResourceKind.INGRESS]
    broken = False
    await network.disconnect()
    assert ledger.held == {}

    assert wire.pod.state() == before


async def test_settings_that_differ_from_a_new_namespaces_are_the_guests(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.pod.run("sysctl", "-qw", "net.core.somaxconn=77", "net.ipv6.conf.eth0.accept_ra=0")
    wire.pod.run("ip", "rule", "add", "from", "10.1.0.2", "lookup", "100")

    network = await connect(connector, wire.pod.path, HookedLedger())

    assert network.sysctls.items() >= {"net.core.somaxconn": "77", "net.ipv6.conf.eth0.accept_ra": "0"}.items()
    assert set(network.sysctls) <= {
        "net.core.somaxconn",
        "net.ipv6.conf.eth0.accept_ra",
        *(f"net.ipv6.conf.{scope}.accept_dad" for scope in ("all", "default", "eth0")),  # the fixture's
    }
    network.close_taps()
    await network.disconnect()
