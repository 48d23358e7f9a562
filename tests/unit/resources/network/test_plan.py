"""The links that become devices of the VM, and their configuration in the guest."""

from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.guest import NetworkAddress
from pyshim.model.network import (
    AddressReport,
    LinkReport,
    NeighbourReport,
    NetworkModel,
    NetworkScan,
    RouteReport,
)
from pyshim.resources.network.plan.network import network_plan

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
    assert [(item.destination, item.gateway, item.device, item.family) for item in plan.routes] == [
        ("10.9.0.1/32", "", "eth0", 4),
        ("fd01::/64", "", "eth0", 6),
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
    [{"protocol": 2}, {"table": 255}, {"table": 100}, {"type": 6}, {"flags": 0x200}, {"index": 1}],
    ids=["made-by-kernel", "local-table", "other-table", "blackhole", "cached", "loopback"],
)
def test_routes_that_are_not_for_the_guest_are_dropped_without_a_word(change: dict[str, Any]) -> None:
    plan = network_plan(scan(ETH0, routes=(route(**change),)))

    assert (plan.routes, plan.left_out) == ((), ())


def test_a_route_no_agent_can_be_told_is_named_for_the_log() -> None:
    plan = network_plan(
        scan(ETH0, routes=(route(index=0, destination="10.5.0.0/16", beyond="several next hops"), route()))
    )

    assert [item.destination for item in plan.routes] == [""]
    assert plan.left_out == ("route to 10.5.0.0/16: several next hops",)


def test_of_two_default_routes_the_one_with_the_lower_metric_comes_first() -> None:
    plan = network_plan(scan(ETH0, ETH1, routes=(route(metric=200), route(index=3, gateway="10.2.0.1", metric=100))))

    assert [item.gateway for item in plan.routes] == ["10.2.0.1", "10.1.0.1"]


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
