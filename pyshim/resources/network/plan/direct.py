"""Directly attachable network: a CNI plugin's file names the devices that the VM gets instead of a namespace's links.
Pure.

The format is Kata's. Unknown members are refused: a misspelt one would leave the pod without network, or with the
network of another pod. An optional member may also be `null`, which Go writes.
"""

import hashlib
import ipaddress
import re
from contextlib import suppress
from typing import Annotated

import msgspec

from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.network import DirectNetwork
from pyshim.model.vm import VhostUserNic
from pyshim.resources.network.plan.network import IFF_NOARP, NUD_PERMANENT, RTNH_F_ONLINK

MAX_DEVICES = 32
MAX_QUEUES = 256
_MAX_NAME_BYTES = 15
_QUEUE_SIZES = (256, 512, 1024)
"""The values that QEMU accepts."""
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_FUNCTION = re.compile(r"([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_Byte = Annotated[int, msgspec.Meta(ge=0, le=0xFF)]
_Short = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object of the file."""


class _VhostUser(_Strict, tag="vhost-user"):
    path: str
    queue_num: Annotated[int, msgspec.Meta(ge=0, le=MAX_QUEUES)] | None = None
    queue_size: int | None = None


class _Vfio(_Strict, tag="vfio"):
    pci_device_id: str


class _HostTap(msgspec.Struct, tag="host-tap"):
    """Kata's third type, which is refused by name."""


class _Interface(_Strict):
    ip_addresses: tuple[str, ...]
    mtu: Annotated[int, msgspec.Meta(ge=68, le=65535)] | None = None
    flags: _Word | None = None
    ntype: str | None = None


class _Route(_Strict):
    dest: str | None = None
    gateway: str | None = None
    source: str | None = None
    scope: _Byte | None = None
    flags: _Word | None = None
    mtu: _Short | None = None


class _Neighbour(_Strict):
    ip_address: str
    hardware_addr: str
    state: _Short | None = None
    flags: _Byte | None = None
    device: str | None = None
    """Ignored: a neighbour belongs to the device that lists it."""


class _NetworkInfo(_Strict):
    interface: _Interface
    routes: tuple[_Route, ...] | None = None
    neighbors: tuple[_Neighbour, ...] | None = None


class _Device(_Strict):
    name: str
    device: _VhostUser | _Vfio | _HostTap
    network_info: _NetworkInfo
    guest_mac: str | None = None


class _File(_Strict):
    devices: Annotated[tuple[_Device, ...], msgspec.Meta(max_length=MAX_DEVICES)]
    netns: str | None = None
    """Ignored: the namespace in which the plugin worked."""


def direct_network(content: bytes, path: str, *, sandbox_id: str, queues: int) -> DirectNetwork:
    """The network that the file at `path` describes; a device that names no number of queue pairs has `queues`.

    Raises InvalidArgument naming file and member, Unimplemented for a type of device that is not supported.
    """
    file = from_json(content, _File, damaged(path))
    found = _Found(sandbox_id, queues)
    for index, device in enumerate(file.devices):
        if isinstance(device.device, _HostTap):
            raise Unimplemented(f"read '{path}': devices[{index}].device.type: 'host-tap' is not available")
        try:
            found.add(device, device.device)
        except ValueError as error:
            raise InvalidArgument(f"read '{path}': devices[{index}]: {error}") from error
    return DirectNetwork(
        vhost_user=tuple(found.vhost_user),
        functions=found.functions,
        interfaces=tuple(found.interfaces),
        routes=tuple(found.routes),
        neighbours=tuple(found.neighbours),
    )


class _Found:
    def __init__(self, sandbox_id: str, queues: int) -> None:
        self.vhost_user: list[VhostUserNic] = []
        self.functions: dict[str, str] = {}
        self.interfaces: list[NetworkInterface] = []
        self.routes: list[NetworkRoute] = []
        self.neighbours: list[NetworkNeighbour] = []
        self._sandbox_id = sandbox_id
        self._queues = queues

    def add(self, device: _Device, kind: _VhostUser | _Vfio) -> None:
        """The device is in the lists. Raises ValueError saying which member is wrong."""
        interface = self._interface(device)
        if isinstance(kind, _VhostUser):
            self.vhost_user.append(self._vhost_user(kind, interface))
        else:
            self.functions[interface.mac] = self._function(kind)
        self.interfaces.append(interface)
        info = device.network_info
        self.routes += [_route(route, device.name) for route in info.routes or ()]
        self.neighbours += [_neighbour(neighbour, device.name) for neighbour in info.neighbors or ()]

    def _interface(self, device: _Device) -> NetworkInterface:
        name, given = _interface_name(device.name), device.network_info.interface
        if name in (interface.name for interface in self.interfaces):
            raise ValueError(f"name {name!r} is another device's as well")
        if not device.guest_mac and isinstance(device.device, _Vfio):
            raise ValueError("guest_mac is missing")  # the card has a MAC that only the plugin can read
        mac = _mac("guest_mac", device.guest_mac) if device.guest_mac else _local_mac(self._sandbox_id, name)
        if mac in (interface.mac for interface in self.interfaces):
            raise ValueError(f"guest_mac {mac} is another device's as well")
        return NetworkInterface(
            name=name,
            addresses=tuple(_interface_address(text) for text in given.ip_addresses),
            mtu=given.mtu or 1500,
            mac=mac,
            flags=(given.flags or 0) & IFF_NOARP,
            type=given.ntype or "",
            device_path="",
        )

    def _vhost_user(self, kind: _VhostUser, interface: NetworkInterface) -> VhostUserNic:
        if not kind.path.startswith("/") or not kind.path.isprintable():
            raise ValueError(f"path {kind.path[:80]!r} is not an absolute path")
        if kind.queue_size and kind.queue_size not in _QUEUE_SIZES:
            raise ValueError(f"queue_size {kind.queue_size} is not one of {', '.join(map(str, _QUEUE_SIZES))}, or 0")
        return VhostUserNic(
            id=f"direct-{len(self.vhost_user)}",
            mac=interface.mac,
            socket_path=kind.path,
            queues=kind.queue_num or self._queues,
            queue_size=kind.queue_size or 0,
            mtu=interface.mtu,
        )

    def _function(self, kind: _Vfio) -> str:
        text = kind.pci_device_id.lower()
        if not _FUNCTION.fullmatch(text):
            raise ValueError(f"pci_device_id {text[:80]!r} is not a PCI address (like 0000:65:00.0)")
        address = text if text.count(":") == 2 else f"0000:{text}"
        if address in self.functions.values():
            raise ValueError(f"pci_device_id {address} is another device's as well")
        return address


def _local_mac(sandbox_id: str, name: str) -> str:
    """A locally administered address of one host: the same each time for one device."""
    digest = hashlib.sha256(f"{sandbox_id}/{name}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (digest[0] & 0xFC | 0x02, *digest[1:6]))


def _route(given: _Route, device: str) -> NetworkRoute:
    destination = _network(given.dest) if given.dest else ""
    gateway = _host_address("gateway", given.gateway) if given.gateway else ""
    source = _host_address("source", given.source) if given.source else ""
    families = {4 if "." in text else 6 for text in (destination, gateway, source) if text}
    if len(families) != 1:
        cause = "has addresses of both families" if families else "has no address at all"
        raise ValueError(f"route to {given.dest or 'default'} {cause}")
    return NetworkRoute(
        destination="" if destination in ("0.0.0.0/0", "::/0") else destination,
        gateway=gateway,
        device=device,
        source=source,
        scope=given.scope or 0,
        family=families.pop(),
        flags=(given.flags or 0) & RTNH_F_ONLINK,
        mtu=given.mtu or 0,
    )


def _neighbour(given: _Neighbour, device: str) -> NetworkNeighbour:
    return NetworkNeighbour(
        address=_host_address("ip_address", given.ip_address),
        device=device,
        mac=_mac("hardware_addr", given.hardware_addr),
        state=given.state or NUD_PERMANENT,
        flags=given.flags or 0,
    )


# ---- values; each raises ValueError naming the member


def _interface_name(name: str) -> str:
    fits = 0 < len(name.encode()) <= _MAX_NAME_BYTES and name not in (".", "..")
    if not fits or not name.isprintable() or any(char in "/:" or char.isspace() for char in name):
        raise ValueError(f"name {name[:80]!r} is not a name of an interface")
    return name


def _mac(member: str, text: str) -> str:
    if not _MAC.fullmatch(text) or int(text[:2], 16) & 1 or not text.strip("0:"):
        raise ValueError(f"{member} {text[:80]!r} is not a MAC address of a device")
    return text.lower()


def _interface_address(text: str) -> NetworkAddress:
    with suppress(ValueError):
        interface = ipaddress.ip_interface(text)
        if "/" in text and not interface.is_loopback:
            return NetworkAddress(address=str(interface.ip), prefix_length=interface.network.prefixlen)
    raise ValueError(f"ip_addresses: {text[:80]!r} is not an address of a device with its prefix length")


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError(f"dest {text[:80]!r} is not a network") from None


def _host_address(member: str, text: str) -> str:
    """Without the prefix length it may be written with."""
    try:
        return str(ipaddress.ip_interface(text).ip)
    except ValueError:
        raise ValueError(f"{member} {text[:80]!r} is not an IP address") from None
