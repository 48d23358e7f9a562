"""A pod with a card of the host beside its other links: the namespace is real, the card is a veth by another name."""

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.network import NetworkModel, NetworkScan, Wiring
from pyshim.resources.devices.host import vfio
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from pyshim.resources.network.plan.network import NetworkPlan, network_plan
from tests.fakes.ledger import FakeLedger
from tests.fakes.vfio import NIC, FakeSysfs
from tests.fakes.wire import Wire, mac

pytestmark = pytest.mark.root
CARD = "0000:41:08.0"
WIRING = Wiring(model=NetworkModel.TCFILTER, queues=1, vhost_net=False, pass_physical=True)


def plan_with_card(scan: NetworkScan, model: NetworkModel, *, pass_physical: bool) -> NetworkPlan:
    """As if the kernel had said of `card` that it is on the PCI bus."""
    links = tuple(replace(link, bus="pci", device=CARD) if link.name == "card" else link for link in scan.links)
    return network_plan(replace(scan, links=links), model, pass_physical=pass_physical)


def ledger_on(sysfs: FakeSysfs) -> FakeLedger:
    def undo(entry: LedgerEntry) -> None:
        if entry.kind is ResourceKind.VFIO:
            vfio.rebind(entry.key, str(entry.detail["driver"]), sys=str(sysfs.root), write=sysfs.write)
        else:
            undo_entry(entry)

    return FakeLedger(undo)


def connector_on(sysfs: FakeSysfs, children: Children, pod: Wire) -> HostNetworkConnector:
    def write(path: str, text: str) -> None:
        sysfs.write(path, text)
        if path.endswith("unbind") and sysfs.state(text)[0] == "":
            pod.pod.run("ip", "link", "delete", "card")  # with its driver a card's interface is gone

    functions = partial(NetworkFunctions, sys=str(sysfs.root), write=write)
    return HostNetworkConnector(children=children, plan=plan_with_card, functions=functions)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "sys")


async def test_a_card_is_taken_last_told_for_good_and_goes_back(wire: Wire, sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    wire.veth("eth0", 1)
    wire.veth("card", 2)
    wire.pod.run("ip", "route", "add", "10.88.0.0/16", "via", "10.2.0.1")

    children, ledger = Children(), ledger_on(sysfs)
    connector = connector_on(sysfs, children, wire)
    network = await connector.connect(wire.pod.path, WIRING, ledger)
    assert {key: item.host_address for key, item in network.functions.items()} == {mac(2): CARD}
    assert [(item.name, item.type) for item in network.interfaces] == [("card", "physical"), ("eth0", "virtual")]
    assert [nic.mac for nic in network.nics] == [mac(1)]
    assert [entry.kind for _, entry in ledger.history][-1] is ResourceKind.VFIO
    assert sysfs.state(CARD)[0] == "vfio-pci"

    # The card's link is no more, but what the guest has of it stays.
    wire.veth("eth1", 3)
    await network.follow()
    assert [item.name for item in network.interfaces] == ["card", "eth0", "eth1"]
    assert [item.device for item in network.routes] == ["card"]

    await network.disconnect()
    assert ledger.held == {}
    await children.end_all()

    assert sysfs.state(CARD) == ("mlx5_core", "")


async def test_a_card_that_cannot_be_taken_leaves_every_link_as_it_was(wire: Wire, sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    sysfs.function("0000:41:08.1", NIC, driver="mlx5_core", group="12")
    wire.veth("eth0", 1)
    wire.veth("card", 2)
    before = wire.pod.state()

    children, ledger = Children(), ledger_on(sysfs)
    with pytest.raises(FailedPrecondition, match=r"0000:41:08\.1 by mlx5_core"):
        await connector_on(sysfs, children, wire).connect(wire.pod.path, WIRING, ledger)
    assert ledger.held == {}
    await children.end_all()

    assert wire.pod.state() == before
    assert sysfs.state(CARD) == ("mlx5_core", "")
