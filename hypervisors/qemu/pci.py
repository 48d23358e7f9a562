"""PCIe ports and the devices behind them: the argv that a VM boots with, and the QMP arguments of later plugging. Pure.

The words are Kata's: root ports share chassis 0 and differ in slot, the switch is one root port, one upstream port and
as many downstream ports as needed.
"""

from hypervisors.qemu.options import Args, Fields, node_name, object_args, option
from pyshim.model.errors import InvalidArgument
from pyshim.model.vm import PciDevice, PciLayout, PciPort, PlacedDevice, PortKind, VfioDevice, VmConfig

SWITCH_ROOT_SLOT = 0x1E
_PORT_CHASSIS, _SWITCH_CHASSIS, _DOWN_CHASSIS = 0, 1, 2
# A port's default share of the 64 KiB of port I/O is 4 KiB: sixteen ports would leave none. PCIe devices need none.
_NO_IO: Fields = {"io-reserve": 0}


def check_layout(config: VmConfig) -> None:
    """Raises InvalidArgument for ports and devices on a machine without PCI, and for those of bridges not there."""
    layout = config.pci
    if config.machine_type != "q35" and (layout.ports or layout.placed or layout.hot_plug):
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {config.machine_type} has no PCIe ports")
    if config.machine_type != "q35" and layout.iommu:
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {config.machine_type} has no IOMMU")
    if layout.hot_plug is PortKind.BRIDGE and not config.bridges:
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: hot plug behind a bridge, and no bridge")


def iommu(layout: PciLayout) -> Args:
    """The guest's IOMMU, Kata's words for it: before every PCI device, so that it is theirs.

    Caching mode has the guest announce new mappings, without which VFIO's could not follow them.
    """
    fields: Fields = {"intremap": True, "device-iotlb": True, "caching-mode": True}
    return ("-device", option("intel-iommu", fields)) if layout.iommu else ()


def machine_properties(layout: PciLayout) -> dict[str, str]:
    """Interrupts are remapped in QEMU, not by an interrupt controller in the host's kernel."""
    return {"kernel-irqchip": "split"} if layout.iommu else {}


def ports(layout: PciLayout) -> Args:
    """The ports, in their order, a switch after the root ports."""
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
    """The words of a device that is there from the start."""
    args: list[str] = []
    for fields in backend_objects(placed.device):
        args += object_args(fields)
    driver, own = model(placed.device)
    place: Fields = {"bus": placed.bus, "addr": f"{placed.slot:#x}"}
    args += ("-device", option(driver, {"id": function_id(placed.device.id), **own, **place}))
    return tuple(args)


def backend_objects(device: PciDevice) -> tuple[Fields, ...]:
    """Arguments of object-add for what the device needs beside itself, in order."""
    if isinstance(device, VfioDevice) and device.iommufd:
        return ({"qom-type": "iommufd", "id": iommufd_id(device.id)},)
    return ()


def model(device: PciDevice) -> tuple[str, Fields]:
    """(QEMU's driver, its properties), bus and address left to the caller."""
    if not isinstance(device, VfioDevice):
        return device.model, dict(device.properties)
    # A device's boot ROM is for firmware that boots from it.
    fields: Fields = {"host": device.host_address, "romfile": ""}
    if device.vendor_id and device.device_id:
        fields |= {"x-pci-vendor-id": device.vendor_id, "x-pci-device-id": device.device_id}
    if device.iommufd:
        fields["iommufd"] = iommufd_id(device.id)
    return "vfio-pci", fields


def hotplug_model(device: PciDevice) -> tuple[str, dict[str, object]]:
    """`model` as device_add takes it: QMP wants numbers where the argv has texts in base 16."""
    driver, fields = model(device)
    numbers = ("x-pci-vendor-id", "x-pci-device-id")
    return driver, {name: int(str(value), 16) if name in numbers else value for name, value in fields.items()}


def function_id(device_id: str) -> str:
    return f"pci-{node_name(device_id)}"


def iommufd_id(device_id: str) -> str:
    return f"iommufd-{node_name(device_id)}"
