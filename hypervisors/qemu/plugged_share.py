"""Plugs a share into a running VM. It can be mounted once the guest's driver has started."""

import asyncio
from contextlib import suppress

from hypervisors.qemu import devices
from hypervisors.qemu.bridges import Bridges
from hypervisors.qemu.options import chardev_id, qdev_id
from hypervisors.qemu.qmp import Monitor
from hypervisors.qemu.vhost_user import ANSWER_TIMEOUT_S, connect_program
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.model.vm import GuestLocation, ShareDevice

DRIVER_TIMEOUT_S = 60.0
"""Seconds for the guest's driver to start. It took 6 s when 30 emulated VMs started on two cores, else some 10 ms."""
_PAUSE_S = 0.01


async def plug_share(monitor: Monitor, share: ShareDevice, bridges: Bridges) -> GuestLocation:
    """The guest can mount the share.

    Raises Unavailable without virtiofsd, DeadlineExceeded when the guest's driver does not start, FailedPrecondition
    when this QEMU does not say whether it has.
    """
    chardev = chardev_id(share.id)
    with connect_program(share.id, share.socket_path) as connection:
        await monitor.getfd(chardev, connection.fileno())
        await monitor.chardev_add(devices.connected_chardev(chardev, fd_name=chardev))
    try:
        fields = devices.share_fields(share, chardev)
        location = await bridges.plug("vhost-user-fs-pci", share.id, fields, ANSWER_TIMEOUT_S)
    except ShimError:
        with suppress(ShimError):
            await monitor.chardev_remove(chardev)
        raise
    await _await_driver(monitor, share)
    return location


async def _await_driver(monitor: Monitor, share: ShareDevice) -> None:
    path = f"/machine/peripheral/{qdev_id(share.id)}/virtio-backend"
    try:
        async with asyncio.timeout(DRIVER_TIMEOUT_S):
            while not (started := await monitor.is_vhost_started(path)):
                if started is None:
                    raise FailedPrecondition(f"plug {share.id!r}: this qemu does not say whether the guest uses it")
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise DeadlineExceeded(f"plug {share.id!r}: the guest does not use it after {DRIVER_TIMEOUT_S:g} s") from None
