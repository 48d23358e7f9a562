"""VFIO and emulated PCI devices of one running VM, in the argv or plugged, and the PCIe ports in use."""

import logging
from contextlib import suppress

from hypervisors.qemu import pci
from hypervisors.qemu.bridges import Bridges
from hypervisors.qemu.qmp import Monitor
from pyshim.model.errors import Internal, ResourceExhausted, ShimError, Unimplemented
from pyshim.model.vm import GuestLocation, PciDevice, PortKind, VmConfig

log = logging.getLogger(__name__)

VFIO_TIMEOUT_S = 120.0
"""Seconds for QEMU's answer: it first pins all of the guest's memory."""


class PciDevices:
    def __init__(self, config: VmConfig, monitor: Monitor, bridges: Bridges) -> None:
        self._config = config
        self._qmp = monitor
        self._bridges = bridges
        self._ports: dict[str, str] = {placed.bus: placed.device.id for placed in config.pci.placed}
        self._objects: dict[str, list[str]] = {
            placed.device.id: [str(fields["id"]) for fields in pci.backend_objects(placed.device)]
            for placed in config.pci.placed
        }

    async def check_locations(self) -> None:
        """Every device of the argv has the planned location. Raises Internal with the first that has another."""
        for placed in self._config.pci.placed:
            found = await self._bridges.locate(pci.function_id(placed.device.id))
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
        qdev = pci.function_id(device.id)
        self._objects[device.id] = []
        try:
            for arguments in pci.backend_objects(device):
                await self._qmp.object_add(arguments)
                self._objects[device.id].append(str(arguments["id"]))
            driver, fields = pci.hotplug_model(device)
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
        await self._qmp.device_remove(pci.function_id(device.id))
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
