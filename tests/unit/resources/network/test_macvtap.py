"""The model `macvtap` for real: a macvtap on a link of the pod's namespace, frames through its queues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.model.errors import FailedPrecondition
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from pyshim.resources.network.host.taps import close_fds, open_vhost_net
from tests.fakes.namespaces import GuestStack
from tests.fakes.open_files import same_open_files
from tests.fakes.wire import HookedLedger, Wire, connect, mac

pytestmark = pytest.mark.root


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


async def test_frames_pass_both_ways_and_the_namespace_is_as_before(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1, mtu=1400)
    wire.veth("net1", 2)
    before, mounts = wire.pod.state(), _mounts()

    network = await connect(connector, wire.pod.path, HookedLedger(), model="macvtap")
    first, second = network.nics
    assert [(nic.mac, nic.mtu, len(nic.tap_fds)) for nic in network.nics] == [(mac(1), 1400, 1), (mac(2), 1500, 1)]
    taps = [link for link in wire.pod.json("ip", "-d", "-j", "link") if link["ifname"].endswith("_kata")]
    assert [tap["linkinfo"]["info_data"]["mode"] for tap in taps] == ["passthru"] * 2
    one = GuestStack(first.tap_fds, mac(1), "10.1.0.2")
    two = GuestStack(second.tap_fds, mac(2), "10.2.0.2")
    with one, two:
        wire.ping("10.1.0.2", payload_bytes=1372)
        wire.ping("10.2.0.2")
    assert (one.echoes > 0, two.echoes > 0, one.largest_bytes) == (True, True, 1414)
    await network.disconnect()

    assert wire.pod.state() == before
    assert _mounts() == mounts


async def test_several_queues_are_one_interface(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)

    network = await connect(connector, wire.pod.path, HookedLedger(), model="macvtap", queues=3)
    (nic,) = network.nics
    assert len(nic.tap_fds) == 3
    with GuestStack(nic.tap_fds, mac(1), "10.1.0.2") as guest:
        wire.ping("10.1.0.2")
    assert guest.echoes
    await network.disconnect()


async def test_the_ledger_alone_undoes_it(wire: Wire, connector: HostNetworkConnector) -> None:
    wire.veth("eth0", 1)
    before = wire.pod.state()
    ledger = HookedLedger()

    network = await connect(connector, wire.pod.path, ledger, model="macvtap")
    network.close_taps()
    network.unwatch()
    assert network.forward_listener is not None
    await network.forward_listener.close()

    for entry in reversed(tuple(ledger.held.values())):
        undo_entry(entry)

    assert wire.pod.state() == before


async def test_a_link_whose_frames_another_program_takes_is_refused_and_left_so(
    wire: Wire, connector: HostNetworkConnector
) -> None:
    wire.veth("eth0", 1)
    wire.pod.run("ip", "link", "add", "link", "eth0", "name", "other0", "type", "macvlan", "mode", "bridge")
    before = wire.pod.state()

    with pytest.raises(FailedPrecondition, match="make macvtap 'veth0_kata' for link 'eth0'"):
        await connect(connector, wire.pod.path, HookedLedger(), model="macvtap")

    assert wire.pod.state() == before


def test_vhost_net_is_one_descriptor_for_each_queue_where_the_host_has_it(tmp_path: Path) -> None:
    device = tmp_path / "vhost-net"
    device.touch()

    fds = open_vhost_net(3, device=str(device))

    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == [str(device)] * 3
    close_fds(fds)


def test_vhost_net_is_done_without_where_the_host_has_none(tmp_path: Path) -> None:
    assert open_vhost_net(2, device=str(tmp_path / "none")) == ()


def test_a_vhost_net_that_is_there_and_broken_is_an_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    with same_open_files(), pytest.raises(IsADirectoryError):
        open_vhost_net(2, device=str(tmp_path))
