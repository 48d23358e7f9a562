"""Links that become devices of the VM, at first and when a namespace has changed, and those that are devices."""

from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.guest import NetworkAddress
from pyshim.model.network import AddressReport, LinkReport, NeighbourReport, NetworkModel, NetworkScan, RouteReport
from pyshim.resources.network.plan.network import EndpointPlan, NetworkPlan, changed_plan, network_plan

ETH0 = LinkReport(
    index=2,
    name="eth0",
    kind="veth",
    hardware_type=1,
    mac="02:00:00:00:00:02",
    mtu=1400,
    flags=0x1043,
    bus="",
    ingress_qdisc="",
)
LOOPBACK = replace(ETH0, index=1, name="lo", kind="", hardware_type=772, mac="00:00:00:00:00:00", mtu=65536, flags=0x49)
ETH1 = replace(ETH0, index=3, name="eth1", mac="02:00:00:00:00:03", mtu=9000)


def address(index: int, text: str, peer: str = "") -> AddressReport:
    host, _, length = text.partition("/")
    return AddressReport(index=index, address=host, prefix_length=int(length), peer=peer)


def route(**fields: Any) -> RouteReport:
    ordinary = RouteReport(
        index=2,
        family=4,
        destination="",
        gateway="10.1.0.1",
        source="",
        table=254,
        protocol=3,
        scope=0,
        type=1,
        flags=0,
        metric=0,
        mtu=0,
        beyond="",
    )
    return replace(ordinary, **fields)


def neighbour(**fields: Any) -> NeighbourReport:
    ordinary = NeighbourReport(index=2, address="10.1.0.9", mac="02:00:00:00:00:09", state=0x80, flags=0)
    return replace(ordinary, **fields)


def scan(
    *links: LinkReport,
    addresses: tuple[AddressReport, ...] | None = None,
    routes: tuple[RouteReport, ...] = (),
    neighbours: tuple[NeighbourReport, ...] = (),
) -> NetworkScan:
    """Every link but loopback has an address unless `addresses` says otherwise."""
    if addresses is None:
        addresses = tuple(address(link.index, f"10.{link.index}.0.2/24") for link in links)
    return NetworkScan(links=(LOOPBACK, *links), addresses=addresses, routes=routes, neighbours=neighbours)


def test_a_tap_name_in_use_is_passed_over() -> None:
    taken = replace(ETH0, index=9, name="veth0_kata", mac="02:00:00:00:00:09")

    plan = network_plan(scan(ETH0, ETH1, taken, addresses=(address(2, "10.1.0.2/24"), address(3, "10.2.0.2/24"))))

    assert [item.tap_name for item in plan.endpoints] == ["veth1_kata", "veth2_kata"]


def test_a_link_without_address_is_no_endpoint_even_of_an_unknown_kind() -> None:
    tunnel = replace(ETH1, name="sit0", kind="sit", hardware_type=776, mac="")

    plan = network_plan(scan(ETH0, tunnel, addresses=(address(2, "10.1.0.2/24"),)))

    assert [item.link_name for item in plan.endpoints] == ["eth0"]


def test_what_names_a_link_that_is_gone_is_ignored() -> None:
    """A link deleted between two dumps leaves addresses, routes and neighbours of an index without a link."""
    gone = 77

    plan = network_plan(
        scan(
            ETH0,
            addresses=(address(2, "10.1.0.2/24"), address(gone, "10.9.0.2/24")),
            routes=(route(index=gone),),
            neighbours=(neighbour(index=gone),),
        )
    )

    assert [item.link_name for item in plan.endpoints] == ["eth0"]
    assert (plan.routes, plan.neighbours, plan.left_out) == ((), (), ())


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("veth", "virtual"),
        ("", "virtual"),
        ("macvlan", "macvlan"),
        ("macvtap", "macvtap"),
        ("ipvlan", "ipvlan"),
        ("vlan", "vlan"),
        ("tun", "tuntap"),
        ("bridge", "bridge"),
    ],
)
def test_the_guest_gets_the_type_of_endpoint(kind: str, sent: str) -> None:
    (interface,) = network_plan(scan(replace(ETH0, kind=kind))).interfaces

    assert interface.type == sent


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"bus": "pci"}, FailedPrecondition, 'cold_plug_vfio is "no-port"'),
        ({"hardware_type": 65534, "kind": "tun", "mac": ""}, Unimplemented, "without Ethernet frames"),
        ({"kind": "dummy"}, Unimplemented, "kind 'dummy'"),
        ({"ingress_qdisc": "ingress"}, FailedPrecondition, "an ingress qdisc already"),
        ({"ingress_qdisc": "clsact"}, FailedPrecondition, "a clsact qdisc already"),
        ({"name": "e\udcff"}, InvalidArgument, "such a name"),
    ],
    ids=["physical", "tun", "unknown-kind", "wired-already", "filtered-already", "unspeakable-name"],
)
def test_a_link_that_cannot_be_wired_is_refused_by_name(
    change: dict[str, Any], error: type[ShimError], words: str
) -> None:
    link = replace(ETH0, **change)

    with pytest.raises(error) as caught:
        network_plan(scan(link))

    assert words in str(caught.value)
    assert repr(link.name) in str(caught.value)


def test_two_links_with_one_mac_are_refused_because_the_agent_finds_links_by_mac() -> None:
    twin = replace(ETH1, mac=ETH0.mac.upper())

    with pytest.raises(InvalidArgument, match="'eth0' and 'eth1'"):
        network_plan(scan(ETH0, twin))


def test_only_noarp_of_the_flags_is_told() -> None:
    (interface,) = network_plan(scan(replace(ETH0, flags=0x1043 | 0x80))).interfaces

    assert interface.flags == 0x80


@pytest.mark.parametrize(
    ("found", "sent"),
    [
        ("10.1.0.2/24", True),
        ("169.254.7.7/16", True),
        ("fd00::2/64", True),
        ("2001:db8::5/128", True),
        ("fe80::5/64", False),
        ("::1/128", False),
        ("127.0.0.9/8", False),
    ],
)
def test_the_guest_makes_link_local_and_loopback_addresses_itself(found: str, sent: bool) -> None:
    (interface,) = network_plan(scan(ETH0, addresses=(address(2, found),))).interfaces

    host, _, length = found.partition("/")
    expected = (NetworkAddress(address=host, prefix_length=int(length)),) if sent else ()
    assert interface.addresses == expected


def test_a_point_to_point_address_becomes_an_address_and_a_route_to_its_peer() -> None:
    plan = network_plan(
        scan(ETH0, addresses=(address(2, "10.1.0.2/32", peer="10.9.0.1"), address(2, "fd00::2/64", peer="fd01::1")))
    )

    assert plan.interfaces[0].addresses == (
        NetworkAddress(address="10.1.0.2", prefix_length=32),
        NetworkAddress(address="fd00::2", prefix_length=128),
    )
    assert [(item.destination, item.gateway, item.device, item.family, item.scope) for item in plan.routes] == [
        ("10.9.0.1/32", "", "eth0", 4, 253),
        ("fd01::/64", "", "eth0", 6, 0),
    ]


def test_a_route_is_told_as_it_is_and_the_default_route_with_an_empty_destination() -> None:
    plan = network_plan(
        scan(
            ETH0,
            routes=(
                route(),
                route(destination="192.168.0.0/16", gateway="", scope=253, source="10.1.0.2", mtu=1300),
                route(family=6, gateway="fe80::1", flags=0x4 | 0x10),
            ),
        )
    )

    assert [(item.destination, item.gateway, item.scope, item.family) for item in plan.routes] == [
        ("", "10.1.0.1", 0, 4),
        ("192.168.0.0/16", "", 253, 4),
        ("", "fe80::1", 0, 6),
    ]
    assert [(item.device, item.source, item.flags, item.mtu) for item in plan.routes] == [
        ("eth0", "", 0, 0),
        ("eth0", "10.1.0.2", 0, 1300),
        ("eth0", "", 0x4, 0),
    ]


@pytest.mark.parametrize(
    "change",
    [{"protocol": 2}, {"table": 255}, {"flags": 0x200}, {"index": 1}],
    ids=["made-by-kernel", "local-table", "cached", "loopback"],
)
def test_routes_that_are_not_for_the_guest_are_dropped_without_a_word(change: dict[str, Any]) -> None:
    plan = network_plan(scan(ETH0, routes=(route(**change),)))

    assert (plan.routes, plan.left_out) == ((), ())


def test_a_route_no_agent_can_be_told_is_named_for_the_log() -> None:
    plan = network_plan(
        scan(ETH0, routes=(route(index=0, destination="10.5.0.0/16", beyond="several next hops"), route()))
    )

    assert [item.destination for item in plan.routes] == [""]
    assert plan.left_out == ("route to 10.5.0.0/16 via 10.1.0.1: several next hops",)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"table": 100}, "route to default via 10.1.0.1: the agent has no table 100"),
        ({"type": 6, "index": 0, "gateway": ""}, "route to default: the agent has no blackhole routes"),
        ({"type": 7, "index": 1, "gateway": ""}, "route to default: the agent has no unreachable routes"),
    ],
    ids=["other-table", "blackhole", "unreachable"],
)
def test_what_a_plugin_set_and_no_agent_can_be_asked_for_is_named(change: dict[str, Any], sentence: str) -> None:
    plan = network_plan(scan(ETH0, routes=(route(**change),)))

    assert (plan.routes, plan.left_out) == ((), (sentence,))


def test_addresses_of_the_loopback_and_rules_are_named() -> None:
    addresses = (address(1, "127.0.0.1/8"), address(1, "10.7.7.7/32"), address(2, "10.2.0.2/24"))
    found = replace(scan(ETH0, addresses=addresses), rules=("from 10.2.0.2/32 lookup 100",))

    assert network_plan(found).left_out == (
        "address 10.7.7.7/32 of the loopback interface",
        "rule 'from 10.2.0.2/32 lookup 100'",
    )


@pytest.mark.parametrize(
    ("metrics", "gateway"),
    [((100, 200), "10.1.0.1"), ((200, 100), "10.2.0.1"), ((0, 0), "10.1.0.1")],
    ids=["first is better", "second is better", "first of equals"],
)
@pytest.mark.parametrize("family", [4, 6])
def test_of_several_routes_to_one_destination_the_guest_gets_the_best(
    metrics: tuple[int, int], gateway: str, family: int
) -> None:
    routes = (
        route(metric=metrics[0], family=family),
        route(metric=metrics[1], family=family, index=3, gateway="10.2.0.1"),
        route(family=10 - family, gateway="10.9.0.1"),
    )

    plan = network_plan(scan(ETH0, ETH1, routes=routes))

    assert [item.gateway for item in plan.routes if item.family == family] == [gateway]
    assert [item.gateway for item in plan.routes if item.family != family] == ["10.9.0.1"]
    assert len(plan.left_out) == 1
    assert "has a better one" in plan.left_out[0]


@pytest.mark.parametrize("metric", [0, 300])
def test_no_route_replaces_the_subnet_route_of_an_address(metric: int) -> None:
    """The kernel's own is how gateways are reached. A subnet that has none of the kernel's keeps the plugin's."""
    kernels = route(protocol=2, destination="10.2.0.0/24", gateway="", scope=253)
    other = route(index=3, destination="10.2.0.0/24", gateway="", scope=253, metric=metric)
    through = route(destination="10.50.0.0/16", gateway="10.2.0.1")

    plan = network_plan(scan(ETH0, ETH1, routes=(kernels, other, through)))
    alone = network_plan(scan(ETH0, ETH1, routes=(other, through)))

    assert [item.destination for item in plan.routes] == ["10.50.0.0/16"]
    assert plan.left_out == ("route to 10.2.0.0/24 dev eth1: the subnet route of an address is there",)
    assert {item.destination for item in alone.routes} == {"10.50.0.0/16", "10.2.0.0/24"}


@pytest.mark.parametrize(
    ("change", "sent"),
    [
        ({}, True),
        ({"address": "fd00::9"}, True),
        ({"state": 0x2}, False),
        ({"state": 0x40}, False),
        ({"mac": ""}, False),
    ],
    ids=["permanent", "permanent-v6", "reachable", "noarp", "no-mac"],
)
def test_only_permanent_neighbours_reach_the_guest(change: dict[str, Any], sent: bool) -> None:
    plan = network_plan(scan(ETH0, neighbours=(neighbour(**change),)))

    assert [item.device for item in plan.neighbours] == (["eth0"] if sent else [])


@pytest.mark.parametrize("kind", ["macvlan", "macvtap", "ipvlan"])
def test_a_macvtap_is_put_on_no_link_that_shares_a_device_with_others(kind: str) -> None:
    found = scan(replace(ETH0, kind=kind))

    assert len(network_plan(found, NetworkModel.TCFILTER).endpoints) == 1
    with pytest.raises(Unimplemented, match=f"'eth0': a {kind} carries no macvtap"):
        network_plan(found, NetworkModel.MACVTAP)


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
    assert [sentence.partition(":")[0] for sentence in plan.refused] == [
        "connect link 'strange'",
        "connect link 'taken'",
        "connect links 'eth0' and 'twin'",
    ]


def test_a_new_link_that_carries_no_macvtap_is_left_out() -> None:
    plan = again(ETH0, replace(ETH1, kind="ipvlan"), model="macvtap")

    assert [item.link_name for item in plan.endpoints] == ["eth0"]
    assert plan.refused == ("connect link 'eth1': a ipvlan carries no macvtap (hint: 'tcfilter' does)",)


CARD = replace(ETH0, kind="", bus="pci", device="0000:41:08.0")


@pytest.mark.parametrize("model", [NetworkModel.TCFILTER, NetworkModel.MACVTAP])
def test_a_card_is_handed_over_and_told_and_the_other_links_are_wired(model: NetworkModel) -> None:
    facts = scan(CARD, ETH1, routes=(route(),), neighbours=(neighbour(),))

    plan = network_plan(facts, model, pass_physical=True)

    (card,) = plan.physical
    assert (card.name, card.mac, card.device) == ("eth0", ETH0.mac, "0000:41:08.0")
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
    assert "the VM runs already" in plan.refused[0]


def test_settings_of_the_namespace_are_the_guests_or_named() -> None:
    """Not those of a link that stays outside, and not of what a guest's kernel may lack."""
    found = replace(
        scan(ETH0, ETH1, addresses=(address(2, "10.2.0.2/24"),)),
        sysctls={
            "core/somaxconn": "77",
            "ipv6/conf/eth0/accept_ra": "0",
            "ipv6/conf/all/disable_ipv6": "1",
            "ipv6/conf/eth1/accept_ra": "0",
            "netfilter/nf_conntrack_max": "9",
        },
    )

    plan = network_plan(found)

    assert plan.sysctls == {
        "net.core.somaxconn": "77",
        "net.ipv6.conf.eth0.accept_ra": "0",
        "net.ipv6.conf.all.disable_ipv6": "1",
    }
    assert plan.left_out == ("sysctl net/netfilter/nf_conntrack_max = '9'",)
