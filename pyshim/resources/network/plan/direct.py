"""Directly attachable network: a CNI plugin's file names the devices that the VM gets instead of a namespace's links.
Pure.

Kata's format: `{"netns", "devices": [{"name", "guest_mac", "device": {"type": "vfio" | "vhost-user", ...},
"network_info": {"interface", "routes", "neighbors"}}]}`. Read strictly: a misspelt member would leave the
pod without network, or with the network of another pod.
"""

import hashlib
import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.network import DirectNetwork
from pyshim.model.vm import VhostUserNic
from pyshim.resources.network.plan.network import IFF_NOARP, NUD_PERMANENT, RTNH_F_ONLINK

MAX_DEVICES = 32
MAX_QUEUES = 256
_MAX_U32 = 0xFFFFFFFF
_MAX_NAME_BYTES = 15
_QUEUE_SIZES = (256, 512, 1024)
"""The values that QEMU accepts."""
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_FUNCTION = re.compile(r"([0-9A-Fa-f]{4}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_UNBUILT_TYPES = frozenset({"host-tap"})

T = TypeVar("T")


def direct_network(content: bytes, path: str, *, sandbox_id: str, queues: int) -> DirectNetwork:
    """The network that the file at `path` describes; a device that names no number of queue pairs has `queues`.

    Raises InvalidArgument naming file and field, Unimplemented for a type of device that is not supported.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"read '{path}': not JSON: {error}") from error
    top = _Fields(document, path, "")
    top.take("netns", _text, "")  # where the plugin worked; nothing of it is connected
    devices = top.take("devices", _list)
    top.end()
    if len(devices) > MAX_DEVICES:
        top.refuse("devices", f"{len(devices)}, at most {MAX_DEVICES}")
    found = _Found(sandbox_id, queues)
    for index, device in enumerate(devices):
        _device(_Fields(device, path, f"devices[{index}]"), found)
    return DirectNetwork(
        vhost_user=tuple(found.vhost_user),
        functions=found.functions,
        interfaces=tuple(found.interfaces),
        routes=tuple(found.routes),
        neighbours=tuple(found.neighbours),
    )


class _Found:
    def __init__(self, sandbox_id: str, queues: int) -> None:
        self.sandbox_id = sandbox_id
        self.queues = queues
        self.vhost_user: list[VhostUserNic] = []
        self.functions: dict[str, str] = {}
        self.interfaces: list[NetworkInterface] = []
        self.routes: list[NetworkRoute] = []
        self.neighbours: list[NetworkNeighbour] = []


class _Fields:
    """A JSON object of the file, taken apart member by member; `at` is where it is."""

    def __init__(self, value: Any, path: str, at: str) -> None:
        self.path = path
        self.at = at
        if not isinstance(value, dict):
            self.refuse("", "not an object")
        self._left: dict[str, Any] = dict(value)

    def take(self, name: str, read: Callable[[Any], T], default: T | None = None) -> T:
        """The member, which must be there unless it has a default; `null` is the same as nothing."""
        value = self._left.pop(name, None)
        if value is None:
            if default is None:
                self.refuse(name, "it is missing")
            return default
        try:
            return read(value)
        except ValueError as error:
            self.refuse(name, str(error))

    def inner(self, name: str) -> "_Fields":
        return _Fields(self.take(name, _any), self.path, self._name(name))

    def objects(self, name: str) -> list["_Fields"]:
        rows: list[Any] = self.take(name, _list, [])
        return [_Fields(row, self.path, f"{self._name(name)}[{index}]") for index, row in enumerate(rows)]

    def end(self) -> None:
        """Raises if a field was not read."""
        if self._left:
            self.refuse(min(self._left), "unknown")

    def refuse(self, name: str, cause: str) -> NoReturn:
        raise InvalidArgument(f"read '{self.path}': {self._name(name) or 'the file'}: {cause}")

    def _name(self, name: str) -> str:
        return ".".join(filter(None, (self.at, name)))


# ---- devices


def _device(fields: _Fields, found: _Found) -> None:
    name = fields.take("name", _interface_name)
    if name in (interface.name for interface in found.interfaces):
        fields.refuse("name", f"{name!r} is another device's as well")
    mac = fields.take("guest_mac", _mac, "")
    what, info = fields.inner("device"), fields.inner("network_info")
    fields.end()
    kind = what.take("type", _text)
    if kind == "vfio" and not mac:
        fields.refuse("guest_mac", "it is missing")  # the card has a MAC that only the plugin can read
    mac = mac or _local_mac(found.sandbox_id, name)
    if mac in (interface.mac for interface in found.interfaces):
        fields.refuse("guest_mac", f"{mac} is another device's as well")
    fields_of_interface = info.inner("interface")
    interface = _interface(fields_of_interface, name, mac)
    _attach(kind, what, interface, found)
    found.interfaces.append(interface)
    found.routes += [_route(row, name) for row in info.objects("routes")]
    found.neighbours += [_neighbour(row, name) for row in info.objects("neighbors")]
    info.end()


def _attach(kind: str, what: _Fields, interface: NetworkInterface, found: _Found) -> None:
    match kind:
        case "vfio":
            address = what.take("pci_device_id", _function)
            if address in found.functions.values():
                what.refuse("pci_device_id", f"{address} is another device's as well")
            found.functions[interface.mac] = address
        case "vhost-user":
            nic = VhostUserNic(
                id=f"direct-{len(found.vhost_user)}",
                mac=interface.mac,
                socket_path=what.take("path", _absolute_path),
                queues=what.take("queue_num", _whole(0, MAX_QUEUES), 0) or found.queues,
                queue_size=what.take("queue_size", _queue_size, 0),
                mtu=interface.mtu,
            )
            found.vhost_user.append(nic)
        case _ if kind in _UNBUILT_TYPES:
            raise Unimplemented(f"read '{what.path}': {what.at}.type: {kind!r} is not available")
        case _:
            what.refuse("type", f"{kind!r} is not one of 'vfio', 'vhost-user'")
    what.end()


def _local_mac(sandbox_id: str, name: str) -> str:
    """A locally administered address of one host: the same each time for one device."""
    digest = hashlib.sha256(f"{sandbox_id}/{name}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (digest[0] & 0xFC | 0x02, *digest[1:6]))


# ---- what goes to the guest


def _interface(fields: _Fields, name: str, mac: str) -> NetworkInterface:
    interface = NetworkInterface(
        name=name,
        addresses=tuple(fields.take("ip_addresses", _addresses)),
        mtu=fields.take("mtu", _whole(68, 65535), 1500),
        mac=mac,
        flags=fields.take("flags", _whole(0, _MAX_U32), 0) & IFF_NOARP,
        type=fields.take("ntype", _text, ""),
        device_path="",
    )
    fields.end()
    return interface


def _route(fields: _Fields, device: str) -> NetworkRoute:
    destination = fields.take("dest", _network, "")
    gateway = fields.take("gateway", _address_or_none, "")
    source = fields.take("source", _address_or_none, "")
    families = {4 if "." in text else 6 for text in (destination, gateway, source) if text}
    if len(families) != 1:
        fields.refuse("", "it has addresses of both families" if families else "it has no address at all")
    (family,) = families
    route = NetworkRoute(
        destination="" if destination in ("0.0.0.0/0", "::/0") else destination,
        gateway=gateway,
        device=device,
        source=source,
        scope=fields.take("scope", _whole(0, 255), 0),
        family=family,
        flags=fields.take("flags", _whole(0, _MAX_U32), 0) & RTNH_F_ONLINK,
        mtu=fields.take("mtu", _whole(0, 65535), 0),
    )
    fields.end()
    return route


def _neighbour(fields: _Fields, device: str) -> NetworkNeighbour:
    fields.take("device", _text, "")  # it is this device's, whatever it is called here
    neighbour = NetworkNeighbour(
        address=fields.take("ip_address", _host_address),
        device=device,
        mac=fields.take("hardware_addr", _mac),
        state=fields.take("state", _whole(0, 0xFFFF), 0) or NUD_PERMANENT,
        flags=fields.take("flags", _whole(0, 0xFF), 0),
    )
    fields.end()
    return neighbour


# ---- values; each raises ValueError saying what is wrong


def _any(value: Any) -> Any:
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{value!r} is not a whole number from {least} to {most}")
        return value

    return read


def _queue_size(value: Any) -> int:
    if value not in (0, *_QUEUE_SIZES) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, _QUEUE_SIZES))}, or 0")
    return int(value)


def _interface_name(value: Any) -> str:
    name = _text(value)
    fits = 0 < len(name.encode()) <= _MAX_NAME_BYTES and name not in (".", "..")
    if not fits or not name.isprintable() or any(char in "/:" or char.isspace() for char in name):
        raise ValueError(f"{name[:80]!r} is not a name of an interface")
    return name


def _mac(value: Any) -> str:
    text = _text(value)
    if not _MAC.fullmatch(text) or int(text[:2], 16) & 1 or not text.strip("0:"):
        raise ValueError(f"{text[:80]!r} is not a MAC address of a device")
    return text.lower()


def _function(value: Any) -> str:
    text = _text(value).lower()
    if not _FUNCTION.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a PCI address (like 0000:65:00.0)")
    return text if text.count(":") == 2 else f"0000:{text}"


def _absolute_path(value: Any) -> str:
    path = _text(value)
    if not path.startswith("/") or not path.isprintable():
        raise ValueError(f"{path[:80]!r} is not an absolute path")
    return path


def _addresses(value: Any) -> list[NetworkAddress]:
    found = []
    for text in _list(value):
        try:
            interface = ipaddress.ip_interface(_text(text))
        except ValueError:
            raise ValueError(f"{text!r} is not an address with its prefix length") from None
        if interface.is_loopback or "/" not in text:
            raise ValueError(f"{text!r} is not an address with its prefix length of a device")
        found.append(NetworkAddress(address=str(interface.ip), prefix_length=interface.network.prefixlen))
    return found


def _network(value: Any) -> str:
    text = _text(value)
    if not text:
        return ""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not a network") from None


def _address_or_none(value: Any) -> str:
    return _host_address(value) if value != "" else ""


def _host_address(value: Any) -> str:
    """Without the prefix length it may be written with."""
    text = _text(value)
    try:
        return str(ipaddress.ip_interface(text).ip)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not an IP address") from None
