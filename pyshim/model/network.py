"""The pod's network: the model it is wired by, and what a scan of its namespace says in rtnetlink's own terms."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.decoding import described
from pyshim.model.guest import NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.vm import VhostUserNic


class NetworkModel(StrEnum):
    """Kata's `internetworking_model`: how a link of the namespace reaches the VM."""

    TCFILTER = "tcfilter"
    """A tap beside the link, every frame redirected from one to the other by tc."""
    MACVTAP = "macvtap"
    """A macvtap on the link, which gets all of its frames: a shorter way, for links that can carry one."""
    NONE = "none"


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """How each link of a pod's namespace is connected to the VM."""

    model: NetworkModel
    queues: int
    vhost_net: bool
    """Each queue gets a vhost-net descriptor if the host has any."""
    received_bits_s: int = 0
    sent_bits_s: int = 0
    """Limits of each interface, as the guest sees them, in bit/s; 0: no limit."""
    pass_physical: bool = False
    """Links that are PCI functions of the host are passed to the VM instead."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    kind: str
    """IFLA_INFO_KIND (`veth`, `macvlan`, `tun`, ...); empty for a device whose driver registers none."""
    hardware_type: int
    """ARPHRD_*: 1 is Ethernet."""
    mac: str
    mtu: int
    flags: int
    """IFF_*."""
    bus: str
    """Bus of the device behind it (`pci`, `virtio`, ...); empty for one that only exists in software."""
    device: str = ""
    """The device's name on that bus: a PCI address, for `pci`."""
    ingress_qdisc: str
    """`ingress` or `clsact` when one is attached; empty for none."""


class AddressReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    address: str
    prefix_length: int
    peer: str
    """The other end of a point-to-point address, whose prefix it then is; empty otherwise."""


class RouteReport(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The interface it leaves by; 0 when it has none or several."""
    family: int
    """4 or 6."""
    destination: str
    """CIDR; empty for the default route."""
    gateway: str
    source: str
    table: int
    protocol: int
    scope: int
    type: int
    flags: int
    metric: int
    mtu: int
    """RTAX_MTU; 0 when the route sets none."""
    beyond: str
    """The part that the agent's API cannot express (`multipath`, `gateway of another family`); mostly empty."""


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


class DirectNetwork(msgspec.Struct, frozen=True, kw_only=True):
    vhost_user: tuple[VhostUserNic, ...]
    functions: Mapping[str, str]
    """MAC in the guest -> PCI address on the host."""
    interfaces: tuple[NetworkInterface, ...]
    routes: tuple[NetworkRoute, ...]
    neighbours: tuple[NetworkNeighbour, ...]
