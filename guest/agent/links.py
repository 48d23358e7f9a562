"""Sets and lists the API's interfaces, routes and neighbours in the guest's kernel.

The rules are kata-agent's. An interface is found by its hardware address and renamed; one that had the name gets the
old name. Routes without a gateway come first, because gateways are reached through them.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface
from typing import TypeVar

from protos.agent.types_pb2 import ARPNeighbor, Interface, IPAddress, IPFamily, Route

from guest.agent import netlink as nl
from guest.agent.errors import Internal, InvalidArgument, NotFound, os_cause
from guest.agent.files import names_in, read_text

log = logging.getLogger(__name__)

_Address = TypeVar("_Address", IPv4Address | IPv6Address, IPv4Interface | IPv6Interface)
_BYTE = re.compile(r"[0-9A-Fa-f]{2}")
_MAX_NAME_BYTES = 15  # IFNAMSIZ with its terminating zero


class Link:
    """One interface of the guest."""

    __slots__ = ("address", "flags", "index", "kind", "mtu", "name")

    def __init__(self, data: bytes) -> None:
        _family, _type, self.index, self.flags, _change = nl.LINK.unpack_from(data)
        found = nl.parse_attributes(data[nl.LINK.size :])
        self.name = found.get(nl.IFLA_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace")
        self.address = found.get(nl.IFLA_ADDRESS, b"")
        self.mtu = int.from_bytes(found.get(nl.IFLA_MTU, b""), sys.byteorder)
        info = nl.parse_attributes(found.get(nl.IFLA_LINKINFO, b""))
        self.kind = info.get(nl.IFLA_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace")


def links(netlink: nl.Netlink) -> list[Link]:
    return [Link(data) for data in netlink.dump(nl.RTM_GETLINK, nl.LINK.pack(0, 0, 0, 0, 0))]


def _by_name(netlink: nl.Netlink, name: str) -> Link:
    for link in links(netlink):
        if link.name == name:
            return link
    raise NotFound(f"interface {name!r}: the guest has none of that name")


# -- addresses as text ---------------------------------------------------------------------------------------------


def hardware_address(text: str) -> bytes:
    """The bytes of `aa:bb:...`. InvalidArgument for anything else."""
    parts = text.split(":")
    if len(parts) not in (6, 8, 20) or not all(map(_BYTE.fullmatch, parts)):
        raise InvalidArgument(f"hardware address {text[:80]!r}: want six bytes in hexadecimal, separated by ':'")
    return bytes.fromhex("".join(parts))


def address_of(text: str) -> IPv4Address | IPv6Address:
    """InvalidArgument for anything but an IPv4 or IPv6 address."""
    try:
        return ip_address(text)
    except ValueError:
        raise InvalidArgument(f"ip address {text[:80]!r}: neither IPv4 nor IPv6") from None


def network_of(text: str) -> IPv4Interface | IPv6Interface:
    """`ADDRESS/BITS`; without `/` the whole address. InvalidArgument for anything else."""
    try:
        return ip_interface(text)
    except ValueError:
        raise InvalidArgument(f"ip network {text[:80]!r}: not an address and the length of its prefix") from None


def ip_text(data: bytes) -> str:
    return str(ip_address(data)) if len(data) in (4, 16) else ""


def _family(version: int) -> socket.AddressFamily:
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _has_ipv6() -> bool:
    for scope in ("all", "default"):
        try:
            if read_text(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").strip() == "0":
                return True
        except OSError:
            continue
    return False


# -- interfaces ----------------------------------------------------------------------------------------------------


def update_interface(interface: Interface, present_name: str) -> None:
    """The link `present_name` has the interface's name, MTU, hardware address, ARP flag and addresses, and is up."""
    check_interface(interface)
    wanted = hardware_address(interface.hwAddr)
    with nl.Netlink() as netlink:
        try:
            link = _by_name(netlink, present_name)
            has_address = link.address == wanted
            if link.flags & nl.IFF_UP or not has_address:  # not every driver accepts an address while it is up
                _set_link(netlink, link.index, 0, nl.IFF_UP)
            if not has_address:  # that of a passed-through card, or with which a restored VM was saved
                _set_link(netlink, link.index, 0, 0, nl.attribute(nl.IFLA_ADDRESS, wanted))
            for address in interface.IPAddresses:
                _add_address(netlink, link.index, address)
            _rename_and_raise(netlink, link, interface)
        except OSError as error:
            raise Internal(f"update interface {interface.name!r}: {os_cause(error)}") from error


def check_interface(interface: Interface) -> None:
    if not interface.name or len(interface.name.encode()) > _MAX_NAME_BYTES or "/" in interface.name:
        raise InvalidArgument(f"interface name {interface.name[:80]!r}: want 1 to {_MAX_NAME_BYTES} bytes without '/'")
    if interface.mtu >> 31:
        raise InvalidArgument(f"interface {interface.name!r}: mtu {interface.mtu}")
    hardware_address(interface.hwAddr)
    for address in interface.IPAddresses:
        network_of(f"{address.address}/{address.mask}")


def name_of(interface: Interface) -> str | None:
    """The present name of the link with the interface's hardware address, else with its name; None without a link."""
    wanted = hardware_address(interface.hwAddr)
    with nl.Netlink() as netlink:
        present = links(netlink)
    found = [link.name for link in present if link.address == wanted]
    found += [link.name for link in present if link.name == interface.name]
    return found[0] if found else None


def _set_link(netlink: nl.Netlink, index: int, flags: int, change: int, attributes: bytes = b"") -> None:
    netlink.request(nl.RTM_NEWLINK, 0, nl.LINK.pack(0, 0, index, flags, change) + attributes)


def _name(name: str) -> bytes:
    return nl.attribute(nl.IFLA_IFNAME, name.encode() + b"\0")


def _add_address(netlink: nl.Netlink, index: int, address: IPAddress) -> None:
    network = network_of(f"{address.address}/{address.mask}")
    if network.version == 6 and not _has_ipv6():
        log.info("no IPv6 in this guest, address skipped", extra={"address": address.address})
        return
    # The host has looked for duplicates already, and a container that starts now must be able to bind.
    flags = nl.IFA_F_NODAD if network.version == 6 else 0
    body = (
        nl.ADDRESS.pack(_family(network.version), network.network.prefixlen, flags, 0, index)
        + nl.attribute(nl.IFA_LOCAL, network.packed)
        + nl.attribute(nl.IFA_ADDRESS, network.packed)
    )
    netlink.request(nl.RTM_NEWADDR, nl.NLM_F_CREATE | nl.NLM_F_REPLACE, body)


def _rename_and_raise(netlink: nl.Netlink, link: Link, interface: Interface) -> None:
    other = None
    if link.name != interface.name:
        other = next((one for one in links(netlink) if one.name == interface.name), None)
        if other is not None:
            _set_link(netlink, other.index, 0, nl.IFF_UP)
            _set_link(netlink, other.index, 0, 0, _name(f"swap{other.index}"))
    flags = nl.IFF_UP | (nl.IFF_NOARP if interface.raw_flags & nl.IFF_NOARP else 0)
    attributes = b"" if link.name == interface.name else _name(interface.name)
    if interface.mtu:
        attributes += nl.number(nl.IFLA_MTU, interface.mtu)
    _set_link(netlink, link.index, flags, nl.IFF_UP | nl.IFF_NOARP, attributes)
    if other is not None:
        was_up = other.flags & nl.IFF_UP
        _set_link(netlink, other.index, was_up, nl.IFF_UP, _name(link.name))


def list_interfaces() -> list[Interface]:
    """Every interface of the guest with its addresses."""
    with nl.Netlink() as netlink:
        present = links(netlink)
        addresses: dict[int, list[IPAddress]] = {}
        for data in netlink.dump(nl.RTM_GETADDR, nl.ADDRESS.pack(0, 0, 0, 0, 0)):
            family, bits, _flags, _scope, index = nl.ADDRESS.unpack_from(data)
            found = nl.parse_attributes(data[nl.ADDRESS.size :])
            text = ip_text(found.get(nl.IFA_LOCAL) or found.get(nl.IFA_ADDRESS, b""))
            entry = IPAddress(
                family=IPFamily.v6 if family == socket.AF_INET6 else IPFamily.v4, address=text, mask=str(bits)
            )
            addresses.setdefault(index, []).append(entry)
    return [
        Interface(
            name=link.name,
            mtu=link.mtu,
            hwAddr=link.address.hex(":"),
            type=link.kind,
            raw_flags=link.flags & nl.IFF_NOARP,
            IPAddresses=addresses.get(link.index, []),
        )
        for link in present
    ]


# -- routes --------------------------------------------------------------------------------------------------------


def update_routes(routes: Iterable[Route]) -> None:
    """The main table has each route, replacing one to the same destination; of several in one call, the first.

    A route that the kernel made for an address stays: gateways are reached through it. The API has no metric.
    """
    with nl.Netlink() as netlink:
        taken = _subnet_routes(netlink)
        for route in sorted(routes, key=lambda one: bool(one.gateway)):
            index = _by_name(netlink, route.device).index
            # Two routes of IPv6 that differ in the source's prefix are not to one destination.
            source = route.source if "/" in route.source and route.family == IPFamily.v6 else ""
            target = (route.family, str(network_of(route.dest).network) if route.dest else "", source)
            if target in taken:
                log.info("route left out, another is there", extra={"destination": target[1], "device": route.device})
                continue
            taken.add(target)
            try:
                netlink.request(nl.RTM_NEWROUTE, nl.NLM_F_CREATE | nl.NLM_F_REPLACE, route_body(route, index))
            except OSError as error:
                where = f"{route.dest or 'default'} via {route.gateway or 'link'} dev {route.device}"
                raise Internal(f"add route {where!r}: {os_cause(error)}") from error


def _subnet_routes(netlink: nl.Netlink) -> set[tuple[int, str, str]]:
    """Family, destination and no source: of the main table's routes that the kernel made."""
    found: set[tuple[int, str, str]] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for data in netlink.dump(nl.RTM_GETROUTE, nl.ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
            _family, bits, _source_bits, _tos, table, protocol, _scope, kind, _flags = nl.ROUTE.unpack_from(data)
            if (table, protocol, kind) == (nl.RT_TABLE_MAIN, nl.RTPROT_KERNEL, nl.RTN_UNICAST):
                destination = ip_text(nl.parse_attributes(data[nl.ROUTE.size :]).get(nl.RTA_DST, b""))
                found.add((IPFamily.v6 if family == socket.AF_INET6 else IPFamily.v4, f"{destination}/{bits}", ""))
    return found


def route_body(route: Route, index: int) -> bytes:
    """The rtmsg of a route through interface `index`."""
    version = 6 if route.family == IPFamily.v6 else 4
    attributes = nl.number(nl.RTA_OIF, index)
    bits = source_bits = 0
    if route.dest:
        dest = _same_family(version, network_of(route.dest))
        bits = dest.network.prefixlen
        attributes += nl.attribute(nl.RTA_DST, dest.packed) if bits else b""
    if route.source:
        source = _same_family(version, network_of(route.source))
        # Only IPv6 routes by source. In IPv4, and for an address without prefix, this is the preferred source.
        if "/" in route.source and version == 6 and source.network.prefixlen:
            source_bits = source.network.prefixlen
            attributes += nl.attribute(nl.RTA_SRC, source.packed)
        else:
            attributes += nl.attribute(nl.RTA_PREFSRC, source.packed)
    if route.gateway:
        attributes += nl.attribute(nl.RTA_GATEWAY, _same_family(version, address_of(route.gateway)).packed)
    if route.mtu:
        attributes += nl.attribute(nl.RTA_METRICS, nl.number(nl.RTAX_MTU, route.mtu))
    family, kind = _family(version), nl.RTN_UNICAST
    header = nl.ROUTE.pack(
        family, bits, source_bits, 0, nl.RT_TABLE_MAIN, nl.RTPROT_BOOT, route.scope & 0xFF, kind, route.flags
    )
    return header + attributes


def _same_family(version: int, found: _Address) -> _Address:
    if version != found.version:
        raise InvalidArgument(f"route: '{found}' is not of the route's address family")
    return found


def list_routes() -> list[Route]:
    """The main table's unicast routes."""
    found = []
    with nl.Netlink() as netlink:
        names = {link.index: link.name for link in links(netlink)}
        for family in (socket.AF_INET, socket.AF_INET6):
            for data in netlink.dump(nl.RTM_GETROUTE, nl.ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
                route = _route(data, family, names)
                if route is not None:
                    found.append(route)
    return found


def _route(data: bytes, family: int, names: dict[int, str]) -> Route | None:
    _family, bits, source_bits, _tos, table, _protocol, scope, kind, flags = nl.ROUTE.unpack_from(data)
    found = nl.parse_attributes(data[nl.ROUTE.size :])
    if table != nl.RT_TABLE_MAIN or kind != nl.RTN_UNICAST:
        return None
    metrics = nl.parse_attributes(found.get(nl.RTA_METRICS, b""))
    dest, source = ip_text(found.get(nl.RTA_DST, b"")), ip_text(found.get(nl.RTA_SRC, b""))
    return Route(
        dest=f"{dest}/{bits}" if dest else "",
        gateway=ip_text(found.get(nl.RTA_GATEWAY, b"")),
        device=names.get(int.from_bytes(found.get(nl.RTA_OIF, b""), sys.byteorder), ""),
        source=f"{source}/{source_bits}" if source else ip_text(found.get(nl.RTA_PREFSRC, b"")),
        scope=scope,
        family=IPFamily.v6 if family == socket.AF_INET6 else IPFamily.v4,
        flags=flags,
        mtu=int.from_bytes(metrics.get(nl.RTAX_MTU, b""), sys.byteorder),
    )


# -- neighbours ----------------------------------------------------------------------------------------------------


def add_neighbours(neighbours: Iterable[ARPNeighbor]) -> None:
    """Each neighbour is in the table, permanently unless it names another state."""
    with nl.Netlink() as netlink:
        for neighbour in neighbours:
            index = _by_name(netlink, neighbour.device).index
            try:
                netlink.request(nl.RTM_NEWNEIGH, nl.NLM_F_CREATE | nl.NLM_F_REPLACE, neighbour_body(neighbour, index))
            except OSError as error:
                raise Internal(f"add neighbour {neighbour.toIPAddress.address!r}: {os_cause(error)}") from error


def neighbour_body(neighbour: ARPNeighbor, index: int) -> bytes:
    """The ndmsg of a neighbour on interface `index`."""
    address = address_of(neighbour.toIPAddress.address)
    state = neighbour.state & 0xFFFF or nl.NUD_PERMANENT
    body = nl.NEIGHBOUR.pack(_family(address.version), index, state, neighbour.flags & 0xFF, 0)
    body += nl.attribute(nl.NDA_DST, address.packed)
    if neighbour.lladdr:
        body += nl.attribute(nl.NDA_LLADDR, hardware_address(neighbour.lladdr))
    return body


def interface_of(folder: str) -> str | None:
    """The interface of the PCI function with this sysfs folder; None if it has none yet."""
    for root in [folder, *(f"{folder}/{name}" for name in names_in(folder) if name.startswith("virtio"))]:
        for name in names_in(f"{root}/net"):
            return name
    return None
