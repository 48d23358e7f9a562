"""Interfaces, routes and neighbours that a real guest agent sets, and how it finds the card that is meant."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent

from protos.agent import agent_pb2, types_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


_links = itertools.count(1)


def in_network_of(agent: HostedAgent, *argv: str) -> Any:
    """What `ip -j ...` says in the agent's network namespace."""
    command = ["nsenter", "--target", str(agent.pid()), "--net", "ip", "-j", *argv]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out or "[]")


@pytest.fixture
def link(hosted_agent: HostedAgent) -> str:
    """The hardware address of a new interface in the agent's network namespace, with a live peer `far`."""
    number = next(_links)
    address = f"02:00:00:00:00:{number:02x}"
    in_network_of(
        hosted_agent, "link", "add", f"near{number}", "address", address, "type", "veth", "peer", "name", "far"
    )
    in_network_of(hosted_agent, "link", "set", "far", "up")
    return address


def interface(address: str, **fields: Any) -> agent_pb2.UpdateInterfaceRequest:
    ips = [
        types_pb2.IPAddress(family=types_pb2.v4, address="10.9.8.7", mask="24"),
        types_pb2.IPAddress(family=types_pb2.v6, address="fd00::7", mask="64"),
    ]
    fields = {"name": "eth0", "device": "eth0", "mtu": 1400, "IPAddresses": ips} | fields
    return agent_pb2.UpdateInterfaceRequest(interface=types_pb2.Interface(hwAddr=address, **fields))


def remove_link(agent: HostedAgent, name: str) -> None:
    in_network_of(agent, "link", "del", name)


def test_an_interface_is_renamed_addressed_and_raised(
    hosted_agent: HostedAgent, client: AgentClient, link: str
) -> None:
    client.call("UpdateInterface", interface(link))

    (found,) = in_network_of(hosted_agent, "addr", "show", "dev", "eth0")
    addresses = {(one["family"], one["local"], one["prefixlen"]) for one in found["addr_info"]}
    assert (found["address"], found["mtu"]) == (link, 1400)
    assert "UP" in found["flags"]
    assert ("inet", "10.9.8.7", 24) in addresses
    assert ("inet6", "fd00::7", 64) in addresses
    listed = {one.name: one for one in client.call("ListInterfaces").Interfaces}
    assert listed["eth0"].hwAddr == link
    assert "10.9.8.7" in [one.address for one in listed["eth0"].IPAddresses]
    remove_link(hosted_agent, "eth0")


def test_updating_twice_changes_nothing(hosted_agent: HostedAgent, client: AgentClient, link: str) -> None:
    client.call("UpdateInterface", interface(link))
    before = in_network_of(hosted_agent, "addr", "show", "dev", "eth0")[0]["addr_info"]

    client.call("UpdateInterface", interface(link))

    after = in_network_of(hosted_agent, "addr", "show", "dev", "eth0")[0]["addr_info"]
    assert [one["local"] for one in after if one["scope"] == "global"] == [
        one["local"] for one in before if one["scope"] == "global"
    ]
    remove_link(hosted_agent, "eth0")


def test_who_has_the_wanted_name_gets_the_old_one(hosted_agent: HostedAgent, client: AgentClient, link: str) -> None:
    (old,) = [one["ifname"] for one in in_network_of(hosted_agent, "link") if one["address"] == link]
    in_network_of(hosted_agent, "link", "add", "eth0", "address", "02:11:11:11:11:11", "type", "bridge")

    client.call("UpdateInterface", interface(link))

    by_address = {one["address"]: one["ifname"] for one in in_network_of(hosted_agent, "link")}
    assert by_address[link] == "eth0"
    assert by_address["02:11:11:11:11:11"] == old
    remove_link(hosted_agent, "eth0")
    remove_link(hosted_agent, old)


def test_routes_are_set_through_the_gateway_and_listed(
    hosted_agent: HostedAgent, client: AgentClient, link: str
) -> None:
    client.call("UpdateInterface", interface(link))
    routes = [
        types_pb2.Route(dest="", gateway="10.9.8.1", device="eth0"),
        types_pb2.Route(dest="10.99.0.0/16", gateway="10.9.8.2", device="eth0", mtu=1300, source="10.9.8.7"),
        types_pb2.Route(dest="192.0.2.1/32", device="eth0", scope=253),
        types_pb2.Route(dest="2001:db8::/32", gateway="fd00::1", device="eth0", family=types_pb2.v6),
    ]

    reply = client.call("UpdateRoutes", agent_pb2.UpdateRoutesRequest(routes=agent_pb2.Routes(Routes=routes)))

    kernel = {one["dst"]: one for one in in_network_of(hosted_agent, "route")}
    assert kernel["default"]["gateway"] == "10.9.8.1"
    assert (kernel["10.99.0.0/16"]["gateway"], kernel["10.99.0.0/16"]["prefsrc"]) == ("10.9.8.2", "10.9.8.7")
    assert kernel["10.99.0.0/16"]["metrics"] == [{"mtu": 1300}]
    assert kernel["192.0.2.1"]["scope"] == "link"
    assert {one["dst"]: one for one in in_network_of(hosted_agent, "-6", "route")}["2001:db8::/32"][
        "gateway"
    ] == "fd00::1"
    listed = {(one.dest, one.gateway, one.device, one.mtu) for one in reply.Routes}
    assert ("10.99.0.0/16", "10.9.8.2", "eth0", 1300) in listed
    assert ("", "10.9.8.1", "eth0", 0) in listed
    assert {(one.dest, one.gateway) for one in client.call("ListRoutes").Routes} == {
        (one.dest, one.gateway) for one in reply.Routes
    }
    remove_link(hosted_agent, "eth0")


def test_of_several_routes_to_one_destination_the_first_counts_and_the_subnet_route_stays(
    hosted_agent: HostedAgent, client: AgentClient, link: str
) -> None:
    client.call("UpdateInterface", interface(link))
    routes = [
        types_pb2.Route(gateway="10.9.8.1", device="eth0"),
        types_pb2.Route(gateway="10.9.8.2", device="eth0"),
        types_pb2.Route(gateway="fd00::1", device="eth0", family=types_pb2.v6),
        types_pb2.Route(gateway="fd00::2", device="eth0", family=types_pb2.v6),
        types_pb2.Route(dest="10.9.8.0/24", device="far", scope=253),
    ]

    client.call("UpdateRoutes", agent_pb2.UpdateRoutesRequest(routes=agent_pb2.Routes(Routes=routes)))

    kernel = in_network_of(hosted_agent, "route") + in_network_of(hosted_agent, "-6", "route")
    assert [one["gateway"] for one in kernel if one["dst"] == "default"] == ["10.9.8.1", "fd00::1"]
    assert [one["dev"] for one in kernel if one["dst"] == "10.9.8.0/24"] == ["eth0"]
    changed = agent_pb2.UpdateRoutesRequest(routes=agent_pb2.Routes(Routes=routes[1:2]))
    client.call("UpdateRoutes", changed)
    assert in_network_of(hosted_agent, "route", "show", "default")[0]["gateway"] == "10.9.8.2"
    remove_link(hosted_agent, "eth0")


def test_a_neighbour_is_permanent_unless_it_says_otherwise(
    hosted_agent: HostedAgent, client: AgentClient, link: str
) -> None:
    client.call("UpdateInterface", interface(link))
    neighbour = types_pb2.ARPNeighbor(
        toIPAddress=types_pb2.IPAddress(address="10.9.8.50"), device="eth0", lladdr="02:aa:bb:cc:dd:ee"
    )

    client.call(
        "AddARPNeighbors", agent_pb2.AddARPNeighborsRequest(neighbors=agent_pb2.ARPNeighbors(ARPNeighbors=[neighbour]))
    )

    (found,) = [one for one in in_network_of(hosted_agent, "neigh", "show", "dev", "eth0") if one["dst"] == "10.9.8.50"]
    assert (found["lladdr"], found["state"]) == ("02:aa:bb:cc:dd:ee", ["PERMANENT"])
    remove_link(hosted_agent, "eth0")


@pytest.mark.parametrize(
    ("method", "request_", "code", "named"),
    [
        ("UpdateInterface", agent_pb2.UpdateInterfaceRequest(), Code.INVALID_ARGUMENT, "no interface"),
        ("UpdateInterface", interface("02:99:99:99:99:99"), Code.NOT_FOUND, "'02:99:99:99:99:99'"),
        ("UpdateInterface", interface("nonsense"), Code.INVALID_ARGUMENT, "'nonsense'"),
        ("UpdateInterface", interface("02:00:00:00:00:01", name="x" * 20), Code.INVALID_ARGUMENT, "x" * 20),
        ("UpdateRoutes", agent_pb2.UpdateRoutesRequest(), Code.INVALID_ARGUMENT, "no routes"),
        (
            "UpdateRoutes",
            agent_pb2.UpdateRoutesRequest(
                routes=agent_pb2.Routes(Routes=[types_pb2.Route(dest="10.0.0.0/99", device="lo")])
            ),
            Code.INVALID_ARGUMENT,
            "'10.0.0.0/99'",
        ),
        (
            "UpdateRoutes",
            agent_pb2.UpdateRoutesRequest(
                routes=agent_pb2.Routes(Routes=[types_pb2.Route(dest="10.0.0.0/8", device="nic9")])
            ),
            Code.NOT_FOUND,
            "'nic9'",
        ),
        ("AddARPNeighbors", agent_pb2.AddARPNeighborsRequest(), Code.INVALID_ARGUMENT, "no neighbours"),
    ],
)
def test_network_nonsense_is_refused_by_name(
    client: AgentClient, method: str, request_: Any, code: int, named: str
) -> None:
    with pytest.raises(CallError) as caught:
        client.call(method, request_)

    assert caught.value.code == code
    assert named in caught.value.message


ROOT = Path(__file__).parents[4]
OLD, NEW = "02:00:00:00:00:01", "02:00:00:00:00:02"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from guest.agent import links
from protos.agent.types_pb2 import Interface, IPAddress
address = IPAddress(address="10.9.8.7", mask="24")
links.update_interface(Interface(name="eth0", hwAddr="{NEW}", mtu=1400, IPAddresses=[address]), "card")
"""


def namespace_after(*commands: str) -> dict[str, dict[str, Any]]:
    """Links by name, once the commands have been run and the interface at `card` was updated."""
    script = "; ".join(("set -e", *(f"ip link {command}" for command in commands), 'exec "$0" -c "$1"'))
    words = ["unshare", "--net", "sh", "-c", f"({script}); ip -j address", sys.executable, PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return {link["ifname"]: link for link in json.loads(done.stdout)}


def test_a_card_with_an_address_of_its_own_gets_the_one_it_is_to_have() -> None:
    links = namespace_after(f"add card address {OLD} type veth peer name far", "set card up")

    assert "card" not in links
    assert (links["eth0"]["address"], links["eth0"]["mtu"]) == (NEW, 1400)
    assert "UP" in links["eth0"]["flags"]
    assert [item["local"] for item in links["eth0"]["addr_info"] if item["family"] == "inet"] == ["10.9.8.7"]


def test_the_place_counts_though_another_has_address_and_name() -> None:
    """The interface of a link that is gone may still be there when the link's successor is plugged."""
    links = namespace_after(
        f"add card address {OLD} type veth peer name far", f"add eth0 address {NEW} type veth peer name far2"
    )

    assert [item["local"] for item in links["eth0"]["addr_info"] if item["family"] == "inet"] == ["10.9.8.7"]
    assert links["card"]["address"] == NEW
    assert links["card"]["addr_info"] == []
