"""The place of each PCI device of a VM: port, slot, and the path by which the guest finds it. Pure.

    pcie.0   01                whatever the machine places by itself (as also between bridges and ports)
             02 ...            pci-bridge-0 ...: disks and NICs added later, devices of `bridge-port` from slot 1 up;
                               with firmware each is at slot 0 of a root port, which has the place on pcie.0
             ... 1e            root ports rp0 ..., and last swrp0, the root port of the switch, if there is one
             1f                the machine's own chip set

Root ports sit at the end of the root bus, in their order, so that their slots are known whatever else the VM has; a
device is at slot 0 behind its port. Sorted by guest path, devices are in the order of their ports.
"""

from collections.abc import Sequence

import msgspec

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from pyshim.model.vm import FIRST_BRIDGE_SLOT, PciDevice, PciLayout, PciPort, PlacedDevice, PortKind

MAX_PORTS = 16
"""Of each kind; Kata's limit."""
BRIDGE_SLOTS = 30
"""Of one PCI bridge: 1 to 30."""
_END_OF_ROOT_BUS = 0x1F
ROOT_BUS = "pcie.0"
_PORT_KEYS = {PortKind.ROOT: "pcie_root_port", PortKind.SWITCH: "pcie_switch_port"}
SWITCH_UP = "swup0"


class PortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The configured ports; a count of 0 means as many as needed."""

    cold_plug: PortKind | None
    hot_plug: PortKind | None
    root_ports: int
    switch_ports: int
    bridges: int
    has_firmware: bool


def port_kind(text: str) -> PortKind | None:
    """The value of `cold_plug_vfio` or `hot_plug_vfio`; None for `no-port`."""
    return None if text == "no-port" else PortKind(text)


def pci_layout(request: PortRequest, devices: Sequence[PciDevice], *, where: str, later: int = 0) -> PciLayout:
    """Ports as asked for or needed, and `devices`, cold plugged, on the first of them, in their order.

    `later` is the number of devices that are certain to be hot plugged; `where` is the configuration's name. Raises
    ResourceExhausted when there are more devices than places, FailedPrecondition when devices may not be cold plugged,
    and InvalidArgument for a device asked for twice.
    """
    if devices and request.cold_plug is None:
        raise FailedPrecondition(f"plug {devices[0].id!r}: cold_plug_vfio in '{where}' is \"no-port\"")
    names = [device.id for device in devices]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"plug {twice!r}: asked for twice")
    ports = _ports(request, len(devices), later, where)
    return PciLayout(ports=ports, placed=_placed(request, ports, devices, where), hot_plug=request.hot_plug)


def _ports(request: PortRequest, devices: int, later: int, where: str) -> tuple[PciPort, ...]:
    wanted = {PortKind.ROOT: request.root_ports, PortKind.SWITCH: request.switch_ports}
    # One spare port where devices may come without notice.
    for kind, needed in ((request.cold_plug, devices), (request.hot_plug, later + 1)):
        if kind in wanted and not wanted[kind]:
            wanted[kind] = needed
    for kind, key in _PORT_KEYS.items():
        if wanted[kind] > MAX_PORTS:
            raise ResourceExhausted(f"place {wanted[kind]} devices: at most {MAX_PORTS} ports ({key} in '{where}')")
    roots, switches = wanted[PortKind.ROOT], wanted[PortKind.SWITCH]
    first = _END_OF_ROOT_BUS - roots - (1 if switches else 0)
    ports = tuple(
        PciPort(id=f"rp{index}", kind=PortKind.ROOT, bus=ROOT_BUS, slot=first + index, pci_path=f"{first + index:02x}")
        for index in range(roots)
    )
    return ports + tuple(
        PciPort(
            id=f"swdp{index}",
            kind=PortKind.SWITCH,
            bus=SWITCH_UP,
            slot=index,
            pci_path=f"{_END_OF_ROOT_BUS - 1:02x}/00/{index:02x}",
        )
        for index in range(switches)
    )


def _placed(
    request: PortRequest, ports: tuple[PciPort, ...], devices: Sequence[PciDevice], where: str
) -> tuple[PlacedDevice, ...]:
    kind = request.cold_plug
    if kind is PortKind.BRIDGE:
        return _behind_bridges(request, devices, where)
    places = [port for port in ports if port.kind is kind]
    if kind is not None and len(devices) > len(places):
        raise ResourceExhausted(
            f"place {len(devices)} devices: {_PORT_KEYS[kind]} = {len(places)} in '{where}' gives fewer ports;"
            " 0 means as many as are needed"
        )
    return tuple(
        PlacedDevice(device=device, bus=port.id, slot=0, pci_path=f"{port.pci_path}/00")
        for device, port in zip(devices, places, strict=False)
    )


def _behind_bridges(request: PortRequest, devices: Sequence[PciDevice], where: str) -> tuple[PlacedDevice, ...]:
    places = request.bridges * BRIDGE_SLOTS
    if len(devices) > places:
        raise ResourceExhausted(
            f"place {len(devices)} devices: default_bridges = {request.bridges} in '{where}' gives {places} slots"
        )
    behind_port = "00/" if request.has_firmware else ""
    placed = []
    for index, device in enumerate(devices):
        bridge, slot = index // BRIDGE_SLOTS, index % BRIDGE_SLOTS + 1
        placed.append(
            PlacedDevice(
                device=device,
                bus=f"pci-bridge-{bridge}",
                slot=slot,
                pci_path=f"{FIRST_BRIDGE_SLOT + bridge:02x}/{behind_port}{slot:02x}",
            )
        )
    return tuple(placed)
