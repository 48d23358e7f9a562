"""A hypervisor whose VMM is allowed to open a device before it is told to."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from hypervisors.base import Device, GuestLocation, Hypervisor


class _Admitting:
    def __init__(self, inner: Hypervisor, allow: Callable[[Device], Awaitable[None]]) -> None:
        self._inner = inner
        self._allow = allow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def plug(self, device: Device) -> GuestLocation:
        await self._allow(device)
        return await self._inner.plug(device)


def admitting(inner: Hypervisor, allow: Callable[[Device], Awaitable[None]]) -> Hypervisor:
    """`inner`, which `allow` is asked for before each `plug`."""
    return cast(Hypervisor, _Admitting(inner, allow))
