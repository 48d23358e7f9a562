"""A namespace with links in use, looked at again: what stays, what is new, what is gone, what cannot be wired."""

from msgspec.structs import replace

from pyshim.model.network import NetworkModel
from pyshim.resources.network.plan.network import EndpointPlan, NetworkPlan, changed_plan, network_plan
from tests.unit.resources.network.test_plan import ETH0, ETH1, address, neighbour, route, scan

IN_USE = replace(ETH0, ingress_qdisc="ingress")
TAP = replace(ETH0, index=8, name="veth0_kata", kind="tun", mac="02:00:00:00:00:08")
ADDRESS = address(2, "10.2.0.2/24")
WIRED = network_plan(scan(ETH0)).endpoints


def again(
    *links: object, wired: tuple[EndpointPlan, ...] = WIRED, model: str = "tcfilter", **facts: object
) -> NetworkPlan:
    addresses = facts.pop("addresses", (ADDRESS, address(3, "10.3.0.2/24")))
    found = scan(*links, addresses=addresses, **facts)  # type: ignore[arg-type]
    return changed_plan(found, NetworkModel(model), wired, first=len(WIRED))


def test_a_link_in_use_stays_as_it_is_though_it_has_our_qdisc_and_a_tap_beside_it() -> None:
    plan = again(IN_USE, TAP)

    assert plan.endpoints == WIRED
    assert [item.name for item in plan.interfaces] == ["eth0"]
    assert plan.left_out == ()


def test_a_new_link_is_numbered_on_and_gets_a_tap_of_its_own() -> None:
    plan = again(IN_USE, TAP, ETH1, routes=(route(index=3, destination="10.9.0.0/16", gateway="10.3.0.1"),))

    assert [(item.id, item.link_name, item.tap_name) for item in plan.endpoints] == [
        ("network-0", "eth0", "veth0_kata"),
        ("network-1", "eth1", "veth1_kata"),
    ]
    assert [item.name for item in plan.interfaces] == ["eth0", "eth1"]
    assert [(item.destination, item.device) for item in plan.routes] == [("10.9.0.0/16", "eth1")]


def test_a_link_that_is_gone_is_no_endpoint_and_nothing_is_told_of_it() -> None:
    plan = again(TAP, addresses=(), routes=(route(),), neighbours=(neighbour(),))

    assert (plan.endpoints, plan.interfaces, plan.routes, plan.neighbours) == ((), (), (), ())


def test_a_link_that_lost_its_address_is_gone_for_the_guest() -> None:
    assert again(IN_USE, TAP, addresses=()).endpoints == ()


def test_a_link_made_with_the_index_of_one_that_is_gone_is_a_new_one() -> None:
    other = replace(ETH0, mac="02:00:00:00:00:77")

    (endpoint,) = again(other, TAP).endpoints

    assert (endpoint.id, endpoint.tap_name, endpoint.mac) == ("network-1", "veth1_kata", "02:00:00:00:00:77")


def test_a_renamed_link_keeps_its_device_and_is_told_by_its_new_name() -> None:
    plan = again(replace(IN_USE, name="net7"), TAP)

    assert [(item.id, item.link_name) for item in plan.endpoints] == [("network-0", "net7")]
    assert [item.name for item in plan.interfaces] == ["net7"]


def test_new_links_that_cannot_be_wired_are_left_out_by_name_and_the_others_are_not() -> None:
    twin = replace(ETH1, index=4, name="twin", mac=ETH0.mac.upper())
    taken = replace(ETH1, index=5, name="taken", mac="02:00:00:00:00:05", ingress_qdisc="clsact")
    strange = replace(ETH1, index=6, name="strange", mac="02:00:00:00:00:06", kind="wireguard")
    everywhere = tuple(address(index, f"10.{index}.0.2/24") for index in range(2, 7))

    plan = again(IN_USE, TAP, ETH1, twin, taken, strange, addresses=everywhere)

    assert [item.link_name for item in plan.endpoints] == ["eth0", "eth1"]
    assert [sentence.partition(":")[0] for sentence in plan.left_out] == [
        "connect link 'strange'",
        "connect link 'taken'",
        "connect links 'eth0' and 'twin'",
    ]


def test_a_new_link_that_carries_no_macvtap_is_left_out() -> None:
    plan = again(ETH0, replace(ETH1, kind="ipvlan"), model="macvtap")

    assert [item.link_name for item in plan.endpoints] == ["eth0"]
    assert plan.left_out == ("connect link 'eth1': a ipvlan carries no macvtap (hint: 'tcfilter' does)",)
