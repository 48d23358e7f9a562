"""The devices of a running VM: each is plugged once, when the VMM may open it, and unplugged with its last user."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from hypervisors.base import Hypervisor
from pyshim.concurrency.tasks import TaskOwner, to_the_end
from pyshim.model.errors import NotFound, ShimError
from pyshim.model.vm import Capabilities, Device, GuestLocation

log = logging.getLogger(__name__)

UNPLUG_WAIT_S = 2.0
"""Seconds that a Delete waits for the guest to release devices."""


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


class PluggedDevices:
    """The devices that containers of one sandbox share."""

    def __init__(self, vm_devices: VmDevices, tasks: TaskOwner, *, forget: Callable[[str], None]) -> None:
        """`forget` is called with the id of each device that has left the VM."""
        self._vm_devices = vm_devices
        self._tasks = tasks
        self._forget = forget
        self._users: dict[str, set[str]] = {}
        """By device; empty while the guest has not released the device."""
        # One per device: a guest that does not release a device delays only its users.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __contains__(self, device_id: str) -> bool:
        return device_id in self._users

    def users(self, device_id: str) -> frozenset[str]:
        return frozenset(self._users[device_id])

    def add(self, device_id: str, user: str) -> None:
        """The device, which is in the VM, stays there at least until `user` is detached."""
        self._users.setdefault(device_id, set()).add(user)

    @asynccontextmanager
    async def locked(self, device_id: str) -> AsyncIterator[None]:
        """In the block, no other caller plugs or unplugs the device; if it was being unplugged, it has left the VM.

        Raises what `unplug` raises for a device that does not leave.
        """
        async with self._locks.setdefault(device_id, asyncio.Lock()):
            if self._users.get(device_id) == set():
                # The guest was asked to release it and may do so at any moment.
                await to_the_end(self._unplug(device_id))
            yield

    async def detach(self, user: str) -> None:
        """`user` has no devices any more. A device without users is unplugged.

        Waits `UNPLUG_WAIT_S` at most for all devices; a slow guest releases them in the background.
        """
        of_user = [device_id for device_id, users in self._users.items() if user in users]
        tasks = [self._tasks.supervise(f"unplug/{user}/{each}", self._detach(each, user)) for each in of_user]
        if tasks:
            await asyncio.wait(tasks, timeout=UNPLUG_WAIT_S)

    async def _detach(self, device_id: str, user: str) -> None:
        async with self._locks.setdefault(device_id, asyncio.Lock()):
            users = self._users.get(device_id, set())
            if user not in users:
                return
            users.discard(user)
            if users:
                return
            try:
                await self._unplug(device_id)
            except ShimError as error:  # the vm has ended, or the next `locked` asks the guest again
                log.debug("unplug device", extra={"device": device_id, "error": str(error)})

    async def _unplug(self, device_id: str) -> None:
        with suppress(NotFound):
            await self._vm_devices.unplug(device_id)
        del self._users[device_id]
        self._forget(device_id)
