"""How a pod's network is wired: the links that become devices of the VM, and the guest's configuration. Pure.

Rules that follow Kata's runtimes, so that one CNI configuration gives one guest: loopback and links without an address
are no endpoints; endpoints are ordered by name; routes that the host's kernel made by itself are left to the guest's
kernel; only permanent neighbours are passed on.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.network import AddressReport, LinkReport, NetworkModel, NetworkScan, RouteReport
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Network
from pyshim.model.vm import LocalVm, MemoryBacking, NicDevice
from pyshim.resources.devices.plan.devices import PASSING_TIMEOUT_S, device_layout

RESOLVER_ADDRESS = "127.0.0.11"
"""Where Docker answers DNS queries, at port 53, in a container's network namespace. Source: libnetwork, resolverIP."""
OWN_NETNS = "/run/netns/pyshim-"
"""Beginning of the paths of the namespaces that shims make; the sandbox's id follows. In iproute2's directory, so that
`ip netns` shows them."""

# linux/if.h, linux/if_arp.h, linux/rtnetlink.h, linux/neighbour.h
IFF_LOOPBACK = 0x8
IFF_NOARP = 0x80
ARPHRD_ETHER = 1
RT_TABLE_MAIN = 254
RT_TABLE_LOCAL = 255
RTN_UNICAST = 1
_ROUTE_TYPES = {6: "blackhole", 7: "unreachable", 8: "prohibit", 9: "throw", 10: "nat"}
RTPROT_KERNEL = 2
RT_SCOPE_LINK = 253
RTM_F_CLONED = 0x200
RTNH_F_ONLINK = 0x4
NUD_PERMANENT = 0x80

# Link kind -> the type sent to Kata's agent. An unnamed kind is a driver that registers none.
_ENDPOINT_TYPES = {
    "veth": "virtual",
    "": "virtual",
    "macvlan": "macvlan",
    "macvtap": "macvtap",
    "ipvlan": "ipvlan",
    "vlan": "vlan",
    "tun": "tuntap",
    "bridge": "bridge",
}
_GUEST_SYSCTLS = frozenset({"core", "ipv4", "ipv6"})
_SHARES_A_DEVICE = frozenset({"macvlan", "macvtap", "ipvlan"})


class HostsNetwork(InvalidArgument):
    """A pod's namespace is the host's."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"enter network namespace: {cause}, and a VM cannot have the host's network")


class EndpointPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of the pod: the link CNI made, and the tap that carries its frames to the VM."""

    id: str
    link_index: int
    link_name: str
    tap_name: str
    mac: str
    mtu: int

    def device(self, tap_fds: tuple[int, ...], vhost_fds: tuple[int, ...]) -> NicDevice:
        """The VM's device. The guest uses the link's own MAC: the other side of the link expects no other."""
        return NicDevice(id=self.id, mac=self.mac, tap_fds=tap_fds, vhost_fds=vhost_fds, mtu=self.mtu)


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    endpoints: tuple[EndpointPlan, ...]
    physical: tuple[LinkReport, ...]
    """Links that are PCI functions of the host and are passed to the VM."""
    interfaces: tuple[NetworkInterface, ...]
    routes: tuple[NetworkRoute, ...]
    neighbours: tuple[NetworkNeighbour, ...]
    refused: tuple[str, ...]
    """For each link that came later and cannot be wired, the reason."""
    sysctls: Mapping[str, str]
    """Settings of the namespace for the guest's kernel, as a spec names them."""
    left_out: tuple[str, ...]
    """One log sentence for each thing that the guest does not get."""


def network_plan(
    scan: NetworkScan, model: NetworkModel = NetworkModel.TCFILTER, *, pass_physical: bool = False
) -> NetworkPlan:
    """The links to wire and the guest's configuration; with `pass_physical` the host's own devices are handed over.

    Raises ShimError naming the first link that cannot be wired.
    """
    links: list[LinkReport] = []
    for link in _candidates(scan):
        _check_link(link, model, beside=links, pass_physical=pass_physical)
        links.append(link)
    wired = [link for link in links if link.bus != "pci"]
    return _plan(scan, links, tuple(_endpoints(scan, wired, first=0)), refused=())


def changed_plan(scan: NetworkScan, model: NetworkModel, wired: Sequence[EndpointPlan], *, first: int) -> NetworkPlan:
    """The plan of a namespace where `wired` endpoints are in use: those whose link is still there stay as they are.

    New ones are numbered from `first` on. A new link that cannot be wired is left out: the pod runs without it already.
    """
    known = {endpoint.link_index: endpoint for endpoint in wired}
    candidates = _candidates(scan)
    # A link of `wired` may have been renamed.
    links = [link for link in candidates if link.index in known and known[link.index].mac == link.mac]
    stay = tuple(replace(known[link.index], link_name=link.name) for link in links)
    new: list[LinkReport] = []
    refused: list[str] = []
    for link in candidates:
        if link in links:
            continue
        try:
            _check_link(link, model, beside=(*links, *new))
        except ShimError as error:
            refused.append(str(error))
        else:
            new.append(link)
    endpoints = (*stay, *_endpoints(scan, new, first=first))
    used = [link for link in candidates if link in links or link in new]
    return _plan(scan, used, endpoints, refused=tuple(refused))


def _plan(
    scan: NetworkScan, links: Sequence[LinkReport], endpoints: tuple[EndpointPlan, ...], refused: tuple[str, ...]
) -> NetworkPlan:
    names = {link.index: link.name for link in links}
    addresses = {link.index: [item for item in scan.addresses if item.index == link.index] for link in links}
    routes, left_out = _routes(scan.routes, names)
    return NetworkPlan(
        endpoints=endpoints,
        physical=tuple(link for link in links if link.bus == "pci"),
        interfaces=tuple(_interface(link, addresses[link.index]) for link in links),
        routes=(*_peer_routes(addresses, names), *routes),
        neighbours=tuple(
            NetworkNeighbour(
                address=item.address, device=names[item.index], mac=item.mac, state=item.state, flags=item.flags
            )
            for item in scan.neighbours
            if item.index in names and item.state == NUD_PERMANENT and item.mac
        ),
        refused=refused,
        sysctls=_guest_sysctls(scan, frozenset(names.values())),
        left_out=(*left_out, *_beside(scan)),
    )


def _guest_sysctls(scan: NetworkScan, names: frozenset[str]) -> dict[str, str]:
    """What a plugin has set and every guest's kernel has: not connection tracking, whose module it may lack.

    A name with a dot, as of an interface for a VLAN, is left out: agents read such names differently.
    """
    found = {}
    for path, value in scan.sysctls.items():
        parts = path.split("/")
        of_other = parts[1] == "conf" and parts[2] not in ("all", "default", *names)
        if parts[0] in _GUEST_SYSCTLS and not of_other and "." not in path:
            found[".".join(("net", *parts))] = value
    return found


def _beside(scan: NetworkScan) -> Iterator[str]:
    """Sentences about what a CNI plugin set beside links and routes, which no agent can be asked for."""
    loopbacks = {link.index for link in scan.links if link.flags & IFF_LOOPBACK}
    for item in scan.addresses:
        if item.index in loopbacks and not ipaddress.ip_address(item.address).is_loopback:
            yield f"address {item.address}/{item.prefix_length} of the loopback interface"
    yield from (f"rule {rule!r}" for rule in scan.rules)
    for path, value in scan.sysctls.items():
        if path.partition("/")[0] not in _GUEST_SYSCTLS:
            yield f"sysctl net/{path} = {value[:80]!r}"


def _candidates(scan: NetworkScan) -> list[LinkReport]:
    """Links with an address, by name."""
    addressed = {address.index for address in scan.addresses}
    links = (link for link in scan.links if link.index in addressed and not link.flags & IFF_LOOPBACK)
    return sorted(links, key=lambda link: link.name)


def _check_link(
    link: LinkReport, model: NetworkModel, *, beside: Sequence[LinkReport], pass_physical: bool = False
) -> None:
    """Raises ShimError unless the link can be wired, `beside` those that are."""
    _check_kind(link, pass_physical)
    if model is NetworkModel.MACVTAP and link.kind in _SHARES_A_DEVICE:
        # The macvtap would be on the device below the link, past whatever separates the pod from it.
        raise Unimplemented(f"connect link {link.name!r}: a {link.kind} carries no macvtap (hint: 'tcfilter' does)")
    for other in beside:
        if other.mac.lower() == link.mac.lower():
            # The agent finds an interface by its MAC and would configure one of them twice.
            raise InvalidArgument(f"connect links {other.name!r} and {link.name!r}: both have the MAC {link.mac}")


def _check_kind(link: LinkReport, pass_physical: bool) -> None:
    subject = f"connect link {link.name!r}"
    if not link.name.isprintable():
        raise InvalidArgument(f"{subject}: the agent cannot express such a name")
    if link.bus == "pci" and not pass_physical:
        raise FailedPrecondition(
            f"{subject}: a physical device, to be handed to the VM when that is made"
            ' (hint: cold_plug_vfio is "no-port", or the VM runs already)'
        )
    if link.hardware_type != ARPHRD_ETHER or not link.mac:
        raise Unimplemented(f"{subject}: a {link.kind or 'link'} without Ethernet frames cannot reach a VM")
    if link.kind not in _ENDPOINT_TYPES:
        known = ", ".join(kind for kind in _ENDPOINT_TYPES if kind)
        raise Unimplemented(f"{subject}: kind {link.kind!r} is not one of {known}")
    if link.ingress_qdisc:
        raise FailedPrecondition(
            f"{subject}: it has {'an' if link.ingress_qdisc == 'ingress' else 'a'} {link.ingress_qdisc} qdisc already "
            "(hint: another sandbox in this namespace, or a CNI plugin that filters inside the pod)"
        )


def _endpoints(scan: NetworkScan, links: list[LinkReport], *, first: int) -> Iterator[EndpointPlan]:
    taken = {link.name for link in scan.links}
    number = first
    for position, link in enumerate(links, start=first):
        while f"veth{number}_kata" in taken:
            number += 1
        yield EndpointPlan(
            id=f"network-{position}",
            link_index=link.index,
            link_name=link.name,
            tap_name=f"veth{number}_kata",
            mac=link.mac,
            mtu=link.mtu,
        )
        number += 1


def _interface(link: LinkReport, addresses: list[AddressReport]) -> NetworkInterface:
    return NetworkInterface(
        name=link.name,
        addresses=tuple(_address(item) for item in addresses if not _is_made_by_guest(item)),
        mtu=link.mtu,
        mac=link.mac,
        flags=link.flags & IFF_NOARP,
        type="physical" if link.bus == "pci" else _ENDPOINT_TYPES[link.kind],
        device_path="",
    )


def _address(item: AddressReport) -> NetworkAddress:
    length = ipaddress.ip_address(item.address).max_prefixlen if item.peer else item.prefix_length
    return NetworkAddress(address=item.address, prefix_length=length)


def _is_made_by_guest(item: AddressReport) -> bool:
    """IPv6 link-local: the guest's kernel makes it from the MAC, as the host's did; a second add would collide."""
    address = ipaddress.ip_address(item.address)
    return address.is_loopback or (address.version == 6 and address.is_link_local)


def _peer_routes(addresses: dict[int, list[AddressReport]], names: dict[int, str]) -> Iterator[NetworkRoute]:
    """The route that a point-to-point address implies; the agent's addresses have no peer, so it needs the route."""
    for index, items in addresses.items():
        for item in items:
            if item.peer:
                network = ipaddress.ip_network((item.peer, item.prefix_length), strict=False)
                yield NetworkRoute(
                    destination=str(network),
                    gateway="",
                    device=names[index],
                    source="",
                    scope=RT_SCOPE_LINK if network.version == 4 else 0,
                    family=network.version,
                    flags=0,
                    mtu=0,
                )


def _routes(reports: tuple[RouteReport, ...], names: dict[int, str]) -> tuple[list[NetworkRoute], tuple[str, ...]]:
    """The guest's routes by metric, one to each destination, and sentences about the others.

    The agent's routes have no metric. So of several to one destination the guest gets the one that the namespace's
    kernel would take: the lowest metric, the first of equal ones. A subnet route that the kernel made for an address
    stays, since gateways are reached through it.
    """
    found: dict[tuple[int, str], NetworkRoute] = {}
    left_out: list[str] = []
    subnets = {
        (report.family, report.destination)
        for report in reports
        if report.table == RT_TABLE_MAIN and report.protocol == RTPROT_KERNEL and report.index in names
    }
    for report in sorted(filter(_is_for_guest, reports), key=lambda report: report.metric):
        target = (report.family, report.destination)
        if cause := _why_not(report):
            left_out.append(f"{_described(report)}: {cause}")
        elif report.index not in names:
            continue  # of a link that the guest does not have
        elif target in subnets:
            left_out.append(f"{_described(report)} dev {names[report.index]}: the subnet route of an address is there")
        elif target in found:
            left_out.append(f"{_described(report)} dev {names[report.index]}: {found[target].device} has a better one")
        else:
            found[target] = NetworkRoute(
                destination=report.destination,
                gateway=report.gateway,
                device=names[report.index],
                source=report.source,
                scope=report.scope,
                family=report.family,
                # The other bits of rtnh_flags are the host kernel's findings (dead, linkdown, offloaded), not a wish.
                flags=report.flags & RTNH_F_ONLINK,
                mtu=report.mtu,
            )
    return list(found.values()), tuple(left_out)


def _is_for_guest(report: RouteReport) -> bool:
    """A program has set it: the kernel's own routes and cached ones come by themselves."""
    return report.table != RT_TABLE_LOCAL and report.protocol != RTPROT_KERNEL and not report.flags & RTM_F_CLONED


def _why_not(report: RouteReport) -> str:
    """Why the agent cannot be asked for such a route; empty if it can."""
    if report.type != RTN_UNICAST:
        return f"the agent has no {_ROUTE_TYPES.get(report.type, f'type {report.type}')} routes"
    if report.table != RT_TABLE_MAIN:
        return f"the agent has no table {report.table}"
    return report.beyond


def _described(report: RouteReport) -> str:
    via = f" via {report.gateway}" if report.gateway else ""
    return f"route to {report.destination or 'default'}{via}"


def vm_with_network(plan: SandboxPlan, network: Network) -> LocalVm:
    """The planned VM with its network devices; functions that are to be hot plugged have a port waiting for them.

    Raises FailedPrecondition for a confidential guest that would have to share its memory, and what `pci_layout` does.
    """
    sockets = network.vhost_user_nics
    vm = replace(plan.local_vm, nics=network.nics, vhost_user_nics=sockets)
    if sockets and vm.guard is not None:
        raise FailedPrecondition(
            f"connect '{sockets[0].socket_path}': a confidential guest shares no memory with the host"
        )
    if sockets and vm.memory.backing is MemoryBacking.PRIVATE:
        vm = replace(vm, memory=replace(vm.memory, backing=MemoryBacking.SHARED_MEMFD))
    if network.functions:
        pci = device_layout(plan.config, plan.devices, tuple(network.functions.values()))
        vm = replace(vm, pci=pci, start_timeout_s=PASSING_TIMEOUT_S)
    return vm
