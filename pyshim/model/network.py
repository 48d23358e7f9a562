"""The pod's network: how its links are connected to the VM, and what its namespace contains, in rtnetlink's terms."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.decoding import described
from pyshim.model.guest import NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.vm import NicDevice, VhostUserNic


class NetworkModel(StrEnum):
    """Kata's `internetworking_model`: how a link of the namespace is connected to the VM."""

    TCFILTER = "tcfilter"
    """By a tap; tc filters redirect every frame between tap and link."""
    MACVTAP = "macvtap"
    """By a macvtap on the link, which gets all its frames. It costs less, but not every kind of link supports it."""
    NONE = "none"


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """How every link of a pod's namespace is connected to the VM."""

    model: NetworkModel
    queues: int
    vhost_net: bool
    """Each queue gets a vhost-net descriptor, if the host has vhost-net."""
    received_bits_s: int = 0
    sent_bits_s: int = 0
    """The limits of each interface, in bit/s, for the guest's directions; 0: no limit."""
    pass_physical: bool = False
    """Links that are PCI functions of the host are passed through to the VM."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    kind: str
    """IFLA_INFO_KIND (`veth`, `macvlan`, `tun`, ...); empty if the link has none."""
    hardware_type: int
    """ARPHRD_*: 1 is Ethernet."""
    mac: str
    mtu: int
    flags: int
    """IFF_*."""
    bus: str
    """The bus of the link's device (`pci`, `virtio`, ...); empty for a link without a device."""
    device: str = ""
    """The device's name on that bus, for `pci` its address."""
    ingress_qdisc: str
    """`ingress` or `clsact`; empty if neither is attached."""


class AddressReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    address: str
    prefix_length: int
    peer: str
    """The peer's address on a point-to-point link, which `prefix_length` then belongs to; empty otherwise."""


class RouteReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The index of the outgoing interface; 0 if it has none or several."""
    family: int
    """4 or 6."""
    destination: str
    """In CIDR notation; empty for the default route."""
    gateway: str
    source: str
    table: int
    protocol: int
    scope: int
    type: int
    flags: int
    metric: int
    mtu: int
    """RTAX_MTU; 0 if the route sets none."""
    beyond: str
    """Why the agent's API cannot express the route (`multipath`, `gateway of another family`); empty if it can."""


class NeighbourReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    address: str
    mac: str
    state: int
    flags: int


@described
class NetworkScan(msgspec.Struct, frozen=True, kw_only=True):
    links: tuple[LinkReport, ...]
    addresses: tuple[AddressReport, ...]
    routes: tuple[RouteReport, ...]
    neighbours: tuple[NeighbourReport, ...]
    sysctls: Mapping[str, str] = {}
    """Settings that differ from a new namespace's, by their path below /proc/sys/net."""
    rules: tuple[str, ...] = ()
    """Rules of routing that a new namespace does not have, as text: `from 10.1.0.2 lookup 100`."""


class FollowedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a later look at a namespace found."""

    added: tuple[NicDevice, ...]
    """Devices of new links, which are connected."""
    gone: tuple[str, ...]
    """Ids of devices whose link is gone."""
    refused: tuple[str, ...]
    """For each link that cannot be connected, the reason."""


class DirectNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a file describes for one sandbox, in place of the links of its namespace (Kata's `dan_conf`)."""

    vhost_user: tuple[VhostUserNic, ...]
    functions: Mapping[str, str]
    """The PCI address on the host, by the MAC in the guest."""
    interfaces: tuple[NetworkInterface, ...]
    routes: tuple[NetworkRoute, ...]
    neighbours: tuple[NetworkNeighbour, ...]
