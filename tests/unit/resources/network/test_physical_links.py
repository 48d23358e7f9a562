"""Links that are devices of the host: configured like others, and handed over or refused."""

import pytest
from msgspec.structs import replace

from pyshim.model.errors import ShimError
from pyshim.model.network import NetworkModel
from pyshim.resources.network.plan.network import changed_plan, network_plan
from tests.unit.resources.network.test_plan import ETH0, ETH1, address, neighbour, route, scan

CARD = replace(ETH0, kind="", bus="pci", device="0000:41:08.0")


@pytest.mark.parametrize("model", [NetworkModel.TCFILTER, NetworkModel.MACVTAP])
def test_a_card_is_handed_over_and_told_and_the_other_links_are_wired(model: NetworkModel) -> None:
    facts = scan(CARD, ETH1, routes=(route(),), neighbours=(neighbour(),))

    plan = network_plan(facts, model, pass_physical=True)

    (card,) = plan.physical
    assert (card.link_name, card.mac, card.address) == ("eth0", ETH0.mac, "0000:41:08.0")
    assert [(item.link_name, item.tap_name, item.id) for item in plan.endpoints] == [
        ("eth1", "veth0_kata", "network-0")
    ]
    assert [(item.name, item.type) for item in plan.interfaces] == [("eth0", "physical"), ("eth1", "virtual")]
    assert [item.device for item in (*plan.routes, *plan.neighbours)] == ["eth0", "eth0"]


def test_a_card_that_must_not_be_handed_over_is_refused_by_name() -> None:
    with pytest.raises(ShimError, match=r"connect link 'eth0': a physical device.*cold_plug_vfio is \"no-port\""):
        network_plan(scan(CARD))


def test_a_card_of_another_kind_than_ethernet_is_refused() -> None:
    with pytest.raises(ShimError, match="without Ethernet frames"):
        network_plan(scan(replace(CARD, hardware_type=32)), pass_physical=True)


def test_a_virtual_function_of_a_nested_hosts_virtio_card_is_no_pci_link() -> None:
    plan = network_plan(scan(replace(ETH0, kind="", bus="virtio", device="virtio0")), pass_physical=True)

    assert (plan.physical, len(plan.endpoints)) == ((), 1)


def test_a_card_that_comes_later_is_left_out() -> None:
    addresses = (address(2, "10.2.0.2/24"), address(3, "10.3.0.2/24"))

    plan = changed_plan(scan(CARD, ETH1, addresses=addresses), NetworkModel.TCFILTER, (), first=0)

    assert [item.link_name for item in plan.endpoints] == ["eth1"]
    assert plan.physical == ()
    assert "the VM runs already" in plan.left_out[0]
