"""Devices behind the PCI bridges of the argv: the slot of each, and its path in the guest.

The shim chooses the slots; the path is read from QEMU's object model (qom).
"""

from collections.abc import Mapping

from hypervisors.qemu import devices
from hypervisors.qemu.options import qdev_id
from hypervisors.qemu.qmp import COMMAND_TIMEOUT_S, Monitor, QmpError, QmpTimeout
from pyshim.model.errors import ResourceExhausted, ShimError
from pyshim.model.vm import FIRST_BRIDGE_SLOT, GuestLocation, PlacedDevice, VmConfig

_FIRST_SLOT, _LAST_SLOT = 1, 30
_MAX_BRIDGE_DEPTH = 10


class BridgeSlots:
    """The slots behind the bridges, and the id of the device in each."""

    def __init__(self, bridges: int, cold: tuple[PlacedDevice, ...] = ()) -> None:
        """The slots of the devices `cold`, which are in the argv, are taken where they are behind a bridge."""
        self._taken: list[dict[int, str]] = [
            {placed.slot: placed.device.id for placed in cold if placed.bus == devices.bridge_id(index)}
            for index in range(bridges)
        ]

    def take(self, device_id: str) -> tuple[int, int]:
        """(bridge, slot), the first free one. Raises ResourceExhausted."""
        for bridge, taken in enumerate(self._taken):
            for slot in range(_FIRST_SLOT, _LAST_SLOT + 1):
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

    def __init__(self, config: VmConfig, monitor: Monitor) -> None:
        self._qmp = monitor
        self._slots = BridgeSlots(config.bridges, config.pci.placed)

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
        place = {"bus": devices.bridge_id(bridge), "addr": f"{slot:#x}"}
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
