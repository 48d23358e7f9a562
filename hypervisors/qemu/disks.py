"""The disks plugged into one running VM: their nodes, the SCSI controller they may share, their I/O threads.

`Hotplug` owns the bridges and the order of changes; it asks this for the part between the monitor and a disk.
"""

import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from hypervisors.base import BlockDevice, DiskAio, GuestLocation
from hypervisors.qemu import block, devices
from hypervisors.qemu.qmp import Monitor, QmpCommandFailed
from hypervisors.qemu.vhost_user import AddBehindBridge, GiveBack, VhostUserDisks
from pyshim.host.processes.launch import describe_os_error
from pyshim.model.errors import FailedPrecondition, ResourceExhausted, ShimError

log = logging.getLogger("hypervisors.qemu.disks")


class Disks:
    def __init__(self, monitor: Monitor, add_behind_bridge: AddBehindBridge, give_back: GiveBack) -> None:
        self._qmp = monitor
        self._add_behind_bridge = add_behind_bridge
        self._served = VhostUserDisks(monitor, add_behind_bridge, give_back)
        self._controller: GuestLocation | None = None
        self._scsi: dict[int, str] = {}
        self._iothreads: set[str] = set()
        self._io_uring_works = True

    def saved(self) -> Mapping[str, str]:
        """Kata's BlockIndexMap: which index which disk has."""
        return {str(index): device_id for index, device_id in self._scsi.items()}

    async def plug(self, disk: BlockDevice) -> GuestLocation:
        if disk.vhost_user is not None:
            return await self._served.plug(disk)
        await self._make_iothread(disk.iothread)
        await self._add_node(disk)
        try:
            if block.is_scsi(disk):
                return await self._plug_scsi(disk)
            return await self._add_behind_bridge("virtio-blk-pci", disk.id, block.virtio_blk(disk))
        except ShimError:
            with suppress(ShimError):
                await self._qmp.blockdev_del(devices.node_name(disk.id))
            raise

    async def unplug(self, disk: BlockDevice) -> None:
        """The guest has let go of the disk and QEMU has closed it; controller and I/O threads stay for the next."""
        if disk.vhost_user is not None:
            await self._served.unplug(disk)
            return
        await self._qmp.device_remove(devices.qdev_id(disk.id))
        await self._qmp.blockdev_del(devices.node_name(disk.id))
        for index in [index for index, holder in self._scsi.items() if holder == disk.id]:
            del self._scsi[index]

    async def _make_iothread(self, name: str) -> None:
        if name and name not in self._iothreads:
            await self._qmp.object_add({"qom-type": "iothread", "id": block.iothread_id(name)})
            self._iothreads.add(name)

    async def _add_node(self, disk: BlockDevice) -> None:
        special = is_block_special(disk)
        aio = disk.tuning.aio
        if aio is DiskAio.IO_URING and not self._io_uring_works:
            aio = DiskAio.THREADS
        try:
            await self._qmp.blockdev_add(block.file_node(disk, is_block_special=special, aio=aio))
        except QmpCommandFailed as error:
            if aio is not DiskAio.IO_URING:
                raise
            # A kernel without it, a container's seccomp filter, a QEMU built without: all mean threads.
            await self._qmp.blockdev_add(block.file_node(disk, is_block_special=special, aio=DiskAio.THREADS))
            self._io_uring_works = False
            log.warning("io_uring does not work here, disks use threads", extra={"error": str(error)})

    async def _plug_scsi(self, disk: BlockDevice) -> GuestLocation:
        if self._controller is None:
            self._controller = await self._add_behind_bridge(
                "virtio-scsi-pci", block.SCSI_ID, block.scsi_controller(disk)
            )
        index = next((number for number in range(block.MAX_SCSI_DISKS) if number not in self._scsi), None)
        if index is None:
            raise ResourceExhausted(f"plug {disk.id!r}: the controller has all its {block.MAX_SCSI_DISKS} disks")
        await self._qmp.device_add("scsi-hd", devices.qdev_id(disk.id), block.scsi_disk(disk, index))
        self._scsi[index] = disk.id
        return GuestLocation(pci_path=self._controller.pci_path, scsi_address=block.scsi_address(index))


def is_block_special(device: BlockDevice) -> bool:
    """Raises FailedPrecondition when `device.path` is neither a file nor a block device."""
    try:
        mode = os.stat(device.path).st_mode
    except OSError as error:
        raise FailedPrecondition(f"plug {device.id!r}: {device.path!r}: {describe_os_error(error)}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        raise FailedPrecondition(f"plug {device.id!r}: {device.path!r} is neither a file nor a block device")
    return stat.S_ISBLK(mode)
