"""Netlink messages of the guest agent, byte by byte."""

from __future__ import annotations

import socket

import pytest

from guest.agent import links, netlink
from guest.agent.errors import InvalidArgument
from protos.agent import types_pb2


def test_an_attribute_is_padded_but_its_length_is_not() -> None:
    assert netlink.attribute(3, b"eth0\0") == b"\x09\x00\x03\x00eth0\0\0\0\0"


def test_attributes_read_back_and_a_cut_one_ends_the_list() -> None:
    data = netlink.attribute(1, b"a") + netlink.attribute(2, b"bcd")

    assert netlink.parse_attributes(data) == {1: b"a", 2: b"bcd"}
    assert netlink.parse_attributes(data[:-3]) == {1: b"a"}
    assert netlink.parse_attributes(b"\x02\x00\x01\x00") == {}


def test_messages_in_a_datagram_are_told_apart() -> None:
    data = netlink.message(16, 5, 1, b"abc") + b"\0" + netlink.message(3, 0, 1, b"")

    found = [(kind, flags, body) for kind, flags, _serial, body in netlink.split(data)]
    assert found == [(16, 5, b"abc"), (3, 0, b"")]
    assert list(netlink.split(data[:10])) == []


def test_a_default_route_has_no_destination_and_a_gateway() -> None:
    body = links.route_body(types_pb2.Route(gateway="10.0.0.1", device="eth0"), 7)

    found = netlink.parse_attributes(body[netlink.ROUTE.size :])
    assert found == {netlink.RTA_OIF: b"\x07\0\0\0", netlink.RTA_GATEWAY: bytes([10, 0, 0, 1])}
    assert netlink.ROUTE.unpack_from(body)[:2] == (socket.AF_INET, 0)


def test_a_route_of_mixed_families_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="address family"):
        links.route_body(types_pb2.Route(dest="fd00::/8", gateway="10.0.0.1"), 1)


@pytest.mark.parametrize("text", ["", "10.0.0", "10.0.0.256", "fd00::zz", "10.0.0.1 "])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        links.address_of(text)
