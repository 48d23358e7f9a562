"""PCIe ports and the devices behind them: options of the argv, and arguments of the QMP commands of hotplug. Pure.

The topology is Kata's: root ports have chassis 0 and differ in slot; a switch is one root port, one upstream port and
as many downstream ports as needed.
"""

from hypervisors.qemu.options import Args, Fields, node_name, object_args, option
from pyshim.model.errors import InvalidArgument
from pyshim.model.vm import PciDevice, PciLayout, PciPort, PlacedDevice, PortKind, VfioDevice, VmConfig

SWITCH_ROOT_SLOT = 0x1E
_PORT_CHASSIS, _SWITCH_CHASSIS, _DOWN_CHASSIS = 0, 1, 2
# By default a port gets 4 KiB of the 64 KiB of port I/O, so 16 ports take all of it. PCIe devices need no port I/O.
_NO_IO: Fields = {"io-reserve": 0}


def check_layout(config: VmConfig) -> None:
    """Raises InvalidArgument for PCIe ports and devices on a machine without PCI, and for hotplug behind no bridge."""
    layout = config.pci
    if config.machine_type != "q35" and (layout.ports or layout.placed or layout.hot_plug):
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {config.machine_type} has no PCIe ports")
    if config.machine_type != "q35" and layout.iommu:
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {config.machine_type} has no IOMMU")
    if layout.hot_plug is PortKind.BRIDGE and not config.bridges:
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: hot plug behind a bridge, and no bridge")


def iommu(layout: PciLayout) -> Args:
    """The guest's IOMMU, with Kata's properties. It must precede every PCI device in the argv to serve them.

    In caching mode the guest announces new mappings, which VFIO has to follow.
    """
    fields: Fields = {"intremap": True, "device-iotlb": True, "caching-mode": True}
    return ("-device", option("intel-iommu", fields)) if layout.iommu else ()


def machine_properties(layout: PciLayout) -> dict[str, str]:
    """Interrupt remapping needs the interrupt controller in QEMU, not in the host's kernel."""
    return {"kernel-irqchip": "split"} if layout.iommu else {}


def ports(layout: PciLayout) -> Args:
    """The root ports in their order, then the switch with its ports."""
    args: list[str] = []
    for port in layout.ports:
        if port.kind is PortKind.ROOT:
            args += _root_port(port.id, slot=port.slot, chassis=_PORT_CHASSIS)
    downstream = [port for port in layout.ports if port.kind is PortKind.SWITCH]
    if downstream:
        args += _root_port("swrp0", slot=SWITCH_ROOT_SLOT, chassis=_SWITCH_CHASSIS)
        args += ("-device", option("x3130-upstream", {"id": "swup0", "bus": "swrp0"}))
    for port in downstream:
        args += ("-device", option("xio3130-downstream", _downstream(port)))
    return tuple(args)


def _root_port(port_id: str, *, slot: int, chassis: int) -> Args:
    fields: Fields = {"id": port_id, "bus": "pcie.0", "addr": f"{slot:#x}", "chassis": chassis, "slot": slot}
    return ("-device", option("pcie-root-port", {**fields, "multifunction": False, **_NO_IO}))


def _downstream(port: PciPort) -> Fields:
    return {
        "id": port.id,
        "bus": port.bus,
        "addr": f"{port.slot:#x}",
        "chassis": _DOWN_CHASSIS,
        "slot": port.slot,
        "multifunction": False,
    }


def placed_device(placed: PlacedDevice) -> Args:
    """A device that the VM boots with."""
    args: list[str] = []
    for fields in backend_objects(placed.device):
        args += object_args(fields)
    driver, own = model(placed.device)
    place: Fields = {"bus": placed.bus, "addr": f"{placed.slot:#x}"}
    args += ("-device", option(driver, {"id": function_id(placed.device.id), **own, **place}))
    return tuple(args)


def backend_objects(device: PciDevice) -> tuple[Fields, ...]:
    """Arguments of object-add for the objects that the device needs, in order."""
    if isinstance(device, VfioDevice) and device.iommufd:
        return ({"qom-type": "iommufd", "id": iommufd_id(device.id)},)
    return ()


def model(device: PciDevice) -> tuple[str, Fields]:
    """(QEMU's driver, properties) of the device, without bus and address."""
    if not isinstance(device, VfioDevice):
        return device.model, dict(device.properties)
    # A boot ROM is for firmware that boots from the device.
    fields: Fields = {"host": device.host_address, "romfile": ""}
    if device.vendor_id and device.device_id:
        fields |= {"x-pci-vendor-id": device.vendor_id, "x-pci-device-id": device.device_id}
    if device.iommufd:
        fields["iommufd"] = iommufd_id(device.id)
    return "vfio-pci", fields


def hotplug_model(device: PciDevice) -> tuple[str, dict[str, object]]:
    """`model` for device_add: numbers in place of the argv's texts in base 16."""
    driver, fields = model(device)
    numbers = ("x-pci-vendor-id", "x-pci-device-id")
    return driver, {name: int(str(value), 16) if name in numbers else value for name, value in fields.items()}


def function_id(device_id: str) -> str:
    return f"pci-{node_name(device_id)}"


def iommufd_id(device_id: str) -> str:
    return f"iommufd-{node_name(device_id)}"
