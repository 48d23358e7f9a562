"""The devices of a running VM: each is plugged once the VMM may open it."""

from collections.abc import Awaitable, Callable

from hypervisors.base import Hypervisor
from pyshim.model.vm import Capabilities, Device, GuestLocation


class VmDevices:
    """The driver's device operations; disks, interfaces and passed-through devices are plugged through it."""

    def __init__(self, hypervisor: Hypervisor, *, allow: Callable[[Device], Awaitable[None]]) -> None:
        """`allow` gives the VMM the right to open a device."""
        self._hypervisor = hypervisor
        self._allow = allow

    def capabilities(self) -> Capabilities:
        return self._hypervisor.capabilities()

    async def plug(self, device: Device) -> GuestLocation:
        await self._allow(device)
        return await self._hypervisor.plug(device)

    async def unplug(self, device_id: str) -> None:
        await self._hypervisor.unplug(device_id)

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        await self._hypervisor.resize_disk(device_id, size_bytes)
