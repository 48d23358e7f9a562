"""The place of each PCI device of a VM: port, slot, and the path by which the guest finds it. Pure.

    pcie.0   01                whatever the machine places by itself (as also between bridges and ports)
             02 ...            pci-bridge-0 ...: disks and NICs added later, devices of `bridge-port` from slot 1 up;
                               with firmware each is at slot 0 of a root port, which has the place on pcie.0
             ... 1e            root ports rp0 ..., and last swrp0, the root port of the switch, if there is one
             1f                the machine's own chip set

Root ports sit at the end of the root bus, in their order, so that their slots are known whatever else the VM has; a
device is at slot 0 behind its port. Sorted by guest path, devices are in the order of their ports.
"""

from collections.abc import Mapping, Sequence

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from pyshim.model.vm import FIRST_BRIDGE_SLOT, PciDevice, PciLayout, PciPort, PlacedDevice, PortKind

MAX_PORTS = 16
"""Of each kind; Kata's limit."""
_END_OF_ROOT_BUS = 0x1F
ROOT_BUS = "pcie.0"
_PORT_KEYS = {PortKind.ROOT: "pcie_root_port", PortKind.SWITCH: "pcie_switch_port"}
SWITCH_UP = "swup0"


def port_kind(text: str) -> PortKind | None:
    """The value of `cold_plug_vfio` or `hot_plug_vfio`; None for `no-port`."""
    return None if text == "no-port" else PortKind(text)


def pci_layout(config: Config, devices: Sequence[PciDevice], *, later: int = 0) -> PciLayout:
    """Ports as configured or needed, and `devices`, cold plugged, on the first of them, in their order.

    `later` is the number of devices that are certain to be hot plugged. Raises ResourceExhausted when there are more
    devices than places, FailedPrecondition when devices may not be cold plugged, and InvalidArgument for a device that
    is listed twice.
    """
    cold_plug = port_kind(config.hypervisor.cold_plug_vfio)
    if devices and cold_plug is None:
        raise FailedPrecondition(f"plug {devices[0].id!r}: cold_plug_vfio in '{config.source}' is \"no-port\"")
    names = [device.id for device in devices]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"plug {twice!r}: asked for twice")
    hot_plug = port_kind(config.hypervisor.hot_plug_vfio)
    # One spare port where devices may come without notice.
    ports = _ports(config, {cold_plug: len(devices), hot_plug: later + 1})
    return PciLayout(ports=ports, placed=_placed(config, cold_plug, ports, devices), hot_plug=hot_plug)


def _ports(config: Config, needed: Mapping[PortKind | None, int]) -> tuple[PciPort, ...]:
    """The root and switch ports: as many as configured, else as many as `needed` by their kind."""
    wanted = {PortKind.ROOT: config.hypervisor.pcie_root_port, PortKind.SWITCH: config.hypervisor.pcie_switch_port}
    for kind, key in _PORT_KEYS.items():
        wanted[kind] = wanted[kind] or needed.get(kind, 0)
        if wanted[kind] > MAX_PORTS:
            raise ResourceExhausted(
                f"place {wanted[kind]} devices: at most {MAX_PORTS} ports ({key} in '{config.source}')"
            )
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
    config: Config, kind: PortKind | None, ports: tuple[PciPort, ...], devices: Sequence[PciDevice]
) -> tuple[PlacedDevice, ...]:
    if kind is PortKind.BRIDGE:
        return _behind_bridges(config, devices)
    places = [port for port in ports if port.kind is kind]
    if kind is not None and len(devices) > len(places):
        raise ResourceExhausted(
            f"place {len(devices)} devices: {_PORT_KEYS[kind]} = {len(places)} in '{config.source}' gives fewer ports;"
            " 0 means as many as are needed"
        )
    return tuple(
        PlacedDevice(device=device, bus=port.id, slot=0, pci_path=f"{port.pci_path}/00")
        for device, port in zip(devices, places, strict=False)
    )


def _behind_bridges(config: Config, devices: Sequence[PciDevice]) -> tuple[PlacedDevice, ...]:
    bridges = config.hypervisor.default_bridges
    machine = config.hypervisor.machine
    places = bridges * machine.bridge_slots
    if len(devices) > places:
        raise ResourceExhausted(
            f"place {len(devices)} devices: default_bridges = {bridges} in '{config.source}' gives {places} slots"
        )
    behind_port = "00/" if config.hypervisor.firmware or not machine.has_acpi_bridges else ""
    behind_slot = "" if machine.has_acpi_bridges else "/00"
    placed = []
    for index, device in enumerate(devices):
        bridge, slot = index // machine.bridge_slots, index % machine.bridge_slots + 1
        bus, address = machine.place_behind(bridge, slot)
        path = f"{FIRST_BRIDGE_SLOT + bridge:02x}/{behind_port}{slot:02x}{behind_slot}"
        placed.append(PlacedDevice(device=device, bus=bus, slot=address, pci_path=path))
    return tuple(placed)
