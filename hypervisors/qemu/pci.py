"""PCIe ports, PCI bridges, and the devices behind them, in the argv or plugged into the running VM.

The topology is Kata's: root ports have chassis 0 and differ in slot; a switch is one root port, one upstream port and
as many downstream ports as needed. The shim chooses the slots behind the bridges; a device's path in the guest is read
from QEMU's object model (qom).
"""

import logging
from collections.abc import Mapping
from contextlib import suppress

from hypervisors.qemu import devices
from hypervisors.qemu.options import Args, Fields, node_name, object_args, option, qdev_id
from hypervisors.qemu.qmp import COMMAND_TIMEOUT_S, Monitor, QmpError, QmpTimeout
from pyshim.model.architecture import MachineType
from pyshim.model.errors import Internal, InvalidArgument, ResourceExhausted, ShimError, Unimplemented
from pyshim.model.vm import (
    FIRST_BRIDGE_SLOT,
    GuestLocation,
    LocalVm,
    PciDevice,
    PciLayout,
    PciPort,
    PlacedDevice,
    PortKind,
    VfioDevice,
)

log = logging.getLogger(__name__)

SWITCH_ROOT_SLOT = 0x1E
_PORT_CHASSIS, _SWITCH_CHASSIS, _DOWN_CHASSIS = 0, 1, 2
# By default a port gets 4 KiB of the 64 KiB of port I/O, so 16 ports take all of it. PCIe devices need no port I/O.
_NO_IO: Fields = {"io-reserve": 0}


def check_layout(config: LocalVm) -> None:
    """Raises InvalidArgument for PCIe ports and devices on a machine without PCI, and for hotplug behind no bridge."""
    layout = config.pci
    if not config.machine.is_pci and (layout.ports or layout.placed or layout.hot_plug):
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {config.machine_type} has no PCIe ports")
    if layout.iommu and not config.machine.has_iommu:
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


_MAX_BRIDGE_DEPTH = 10


class BridgeSlots:
    """The slots behind the bridges, and the id of the device in each."""

    def __init__(self, machine: MachineType, bridges: int, cold: tuple[PlacedDevice, ...] = ()) -> None:
        """The slots of the devices `cold`, which are in the argv, are taken where they are behind a bridge."""
        self.machine = machine
        there = {(placed.bus, placed.slot): placed.device.id for placed in cold}
        self._slots = range(1, machine.bridge_slots + 1)
        self._taken: list[dict[int, str]] = [
            {slot: there[place] for slot in self._slots if (place := machine.place_behind(index, slot)) in there}
            for index in range(bridges)
        ]

    def take(self, device_id: str) -> tuple[int, int]:
        """(bridge, slot), the first free one. Raises ResourceExhausted."""
        for bridge, taken in enumerate(self._taken):
            for slot in self._slots:
                if slot not in taken:
                    taken[slot] = device_id
                    return bridge, slot
        raise ResourceExhausted(f"plug {device_id!r}: no free slot on {len(self._taken)} PCI bridge(s)")

    def free(self, device_id: str) -> None:
        for taken in self._taken:
            for slot in [slot for slot, owner in taken.items() if owner == device_id]:
                del taken[slot]

    def saved(self) -> list[dict[str, object]]:
        """Kata's `Bridges` of persist.json."""
        return [
            {
                "DeviceAddr": {str(slot): device_id for slot, device_id in taken.items()},
                "Type": "pci",
                "ID": devices.bridge_id(index),
                "Addr": FIRST_BRIDGE_SLOT + index,
            }
            for index, taken in enumerate(self._taken)
        ]


class Bridges:
    """The bridges of one running VM."""

    def __init__(self, config: LocalVm, monitor: Monitor) -> None:
        self._qmp = monitor
        self._slots = BridgeSlots(config.machine, config.bridges, config.pci.placed)

    def saved(self) -> list[dict[str, object]]:
        return self._slots.saved()

    async def plug(
        self, driver: str, device_id: str, fields: Mapping[str, object], timeout_s: float = COMMAND_TIMEOUT_S
    ) -> GuestLocation:
        """A device of QEMU's `driver` is at the first free slot. Errors as of `add`, and QmpError."""
        qdev = qdev_id(device_id)
        await self.add(driver, device_id, qdev, fields, timeout_s)
        return await self.locate(qdev)

    async def add(self, driver: str, device_id: str, qdev: str, fields: Mapping[str, object], timeout_s: float) -> None:
        """Like `plug`, with the id `qdev` in QEMU. Raises ResourceExhausted, and what `device_add` raises.

        The slot is free again after an error other than QmpTimeout: after that one QEMU may still add the device.
        """
        bridge, slot = self._slots.take(device_id)
        bus, address = self._slots.machine.place_behind(bridge, slot)
        place = {"bus": bus, "addr": f"{address:#x}"}
        try:
            await self._qmp.device_add(driver, qdev, {**fields, **place}, timeout_s)
        except QmpTimeout:
            raise
        except ShimError:
            self._slots.free(device_id)
            raise

    def free(self, device_id: str) -> None:
        """The slot of the device, if it has one, is free: QEMU has removed the device."""
        self._slots.free(device_id)

    async def locate(self, qdev: str) -> GuestLocation:
        """The guest's path of the device with QEMU's id `qdev`, behind a bridge or not. Raises QmpError."""
        path = f"/machine/peripheral/{qdev}"
        slots: list[str] = []
        for _ in range(_MAX_BRIDGE_DEPTH):
            address = await self._qmp.qom_get(path, "addr")
            bus = await self._qmp.qom_get(path, "parent_bus")
            if not isinstance(address, int) or not isinstance(bus, str):
                raise QmpError(f"locate {qdev!r}: qemu names no address for {path!r}")
            slots.insert(0, f"{address >> 3:02x}")
            parent, _, name = bus.rpartition("/")
            if name == devices.ROOT_BUS:
                return GuestLocation(pci_path="/".join(slots))
            path = parent
        raise QmpError(f"locate {qdev!r}: more than {_MAX_BRIDGE_DEPTH} bridges deep")


VFIO_TIMEOUT_S = 120.0
"""Seconds for QEMU's answer: it first pins all of the guest's memory."""


class PciDevices:
    def __init__(self, config: LocalVm, monitor: Monitor, bridges: Bridges) -> None:
        self._config = config
        self._qmp = monitor
        self._bridges = bridges
        self._ports: dict[str, str] = {placed.bus: placed.device.id for placed in config.pci.placed}
        self._objects: dict[str, list[str]] = {
            placed.device.id: [str(fields["id"]) for fields in backend_objects(placed.device)]
            for placed in config.pci.placed
        }

    async def check_locations(self) -> None:
        """Every device of the argv has the planned location. Raises Internal with the first that has another."""
        for placed in self._config.pci.placed:
            found = await self._bridges.locate(function_id(placed.device.id))
            if found.pci_path != placed.pci_path:
                raise Internal(
                    f"place {placed.device.id!r} in vm {self._config.sandbox_id!r}: qemu has it at"
                    f" {found.pci_path}, the plan at {placed.pci_path}"
                )

    async def plug(self, device: PciDevice) -> GuestLocation:
        """Raises Unimplemented without `hot_plug`, ResourceExhausted when no port is free."""
        kind = self._config.pci.hot_plug
        if kind is None:
            raise Unimplemented(f'plug {device.id!r}: hot_plug_vfio is "no-port" for vm {self._config.sandbox_id!r}')
        port = None if kind is PortKind.BRIDGE else self._free_port(kind, device)
        qdev = function_id(device.id)
        self._objects[device.id] = []
        try:
            for arguments in backend_objects(device):
                await self._qmp.object_add(arguments)
                self._objects[device.id].append(str(arguments["id"]))
            driver, fields = hotplug_model(device)
            if port is None:
                await self._bridges.add(driver, device.id, qdev, fields, VFIO_TIMEOUT_S)
            else:
                self._ports[port] = device.id
                await self._qmp.device_add(driver, qdev, {**fields, "bus": port, "addr": "0x0"}, VFIO_TIMEOUT_S)
            return await self._bridges.locate(qdev)
        except ShimError:
            with suppress(ShimError):
                # The slot is free only once QEMU reports no device there: a plug that timed out may still succeed.
                await self._qmp.device_remove(qdev)
                await self._release(device.id)
            raise

    async def unplug(self, device: PciDevice) -> None:
        """The guest has released the device, and its port is free."""
        await self._qmp.device_remove(function_id(device.id))
        await self._release(device.id)

    async def _release(self, device_id: str) -> None:
        self._bridges.free(device_id)
        for object_id in reversed(self._objects.pop(device_id, [])):
            with suppress(ShimError):
                await self._qmp.object_del(object_id)
        for port in [port for port, holder in self._ports.items() if holder == device_id]:
            del self._ports[port]

    def _free_port(self, kind: PortKind, device: PciDevice) -> str:
        ports = [port.id for port in self._config.pci.ports if port.kind is kind]
        for port in ports:
            if port not in self._ports:
                return port
        raise ResourceExhausted(f"plug {device.id!r}: all {len(ports)} {kind}s are taken")
