"""Links as odd as the kernel allows, and scans that are disturbed: names no shell would like, links in a hurry."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted

from pyshim.model.errors import InvalidArgument
from pyshim.resources.network.host import netlink
from pyshim.resources.network.host.connector import HostNetworkConnector
from tests.fakes.namespaces import GuestStack
from tests.fakes.wire import HookedLedger, Wire, connect, mac

pytestmark = pytest.mark.root


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
    assert netlink._dump(lambda: disturbed(4)) == (1, 2)
    assert len(asked) == 5
    asked.clear()
    with pytest.raises(NetlinkDumpInterrupted):
        netlink._dump(lambda: disturbed(5))


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
