"""A hypervisor whose VMM has access to a device before it is told to plug it."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from hypervisors.base import Device, GuestLocation, Hypervisor


class _WithDeviceAccess:
    def __init__(self, inner: Hypervisor, allow: Callable[[Device], Awaitable[None]]) -> None:
        self._inner = inner
        self._allow = allow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def plug(self, device: Device) -> GuestLocation:
        await self._allow(device)
        return await self._inner.plug(device)


def with_device_access(inner: Hypervisor, allow: Callable[[Device], Awaitable[None]]) -> Hypervisor:
    """`inner`, before each `plug` of which `allow` gives its VMM the right to open the device."""
    return cast(Hypervisor, _WithDeviceAccess(inner, allow))
