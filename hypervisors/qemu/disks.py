"""The disks plugged into one running VM: their block nodes, SCSI addresses and I/O threads."""

import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from hypervisors.qemu import block
from hypervisors.qemu.bridges import Bridges
from hypervisors.qemu.options import node_name, qdev_id
from hypervisors.qemu.qmp import Monitor, QmpCommandFailed
from hypervisors.qemu.vhost_user import VhostUserDisks
from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.own_thread import in_own_thread
from pyshim.model.errors import FailedPrecondition, ResourceExhausted, ShimError
from pyshim.model.vm import BlockDevice, DiskAio, GuestLocation

log = logging.getLogger(__name__)


class Disks:
    def __init__(self, monitor: Monitor, bridges: Bridges) -> None:
        self._qmp = monitor
        self._bridges = bridges
        self._vhost_user = VhostUserDisks(monitor, bridges)
        self._scsi_disks: dict[int, str] = {}
        self._iothreads: set[str] = set()
        self._io_uring_works = True
        self._fdsets: dict[str, int] = {}
        """Disk id -> the set of descriptors from which QEMU opens the disk."""

    def saved(self) -> Mapping[str, str]:
        """Kata's BlockIndexMap: index on the SCSI controller -> disk id."""
        return {str(index): device_id for index, device_id in self._scsi_disks.items()}

    async def plug(self, disk: BlockDevice) -> GuestLocation:
        if disk.vhost_user is not None:
            return await self._vhost_user.plug(disk)
        await self._add_iothread(disk.iothread)
        await self._add_node(disk)
        try:
            if block.is_scsi(disk):
                return await self._plug_scsi(disk)
            return await self._bridges.plug("virtio-blk-pci", disk.id, block.virtio_blk(disk))
        except ShimError:
            with suppress(ShimError):
                await self._remove_node(disk)
            raise

    async def unplug(self, disk: BlockDevice) -> None:
        """The guest has released the disk and QEMU has closed it. Its I/O thread stays, for later disks."""
        if disk.vhost_user is not None:
            await self._vhost_user.unplug(disk)
            return
        await self._qmp.device_remove(qdev_id(disk.id))
        await self._remove_node(disk)
        for index in [index for index, holder in self._scsi_disks.items() if holder == disk.id]:
            del self._scsi_disks[index]

    async def _add_iothread(self, name: str) -> None:
        if name and name not in self._iothreads:
            await self._qmp.object_add({"qom-type": "iothread", "id": block.iothread_id(name)})
            self._iothreads.add(name)

    async def _add_node(self, disk: BlockDevice) -> None:
        with OwnedFd(await in_own_thread(_open_disk, disk)) as file:
            is_block_special = stat.S_ISBLK(os.fstat(file.fileno()).st_mode)
            fdset = await self._qmp.add_fd(file.fileno())
        try:
            await self._add_node_over(disk, fdset, is_block_special)
        except ShimError:
            with suppress(ShimError):
                await self._qmp.remove_fd(fdset)
            raise
        self._fdsets[disk.id] = fdset

    async def _add_node_over(self, disk: BlockDevice, fdset: int, is_block_special: bool) -> None:
        aio = disk.tuning.aio
        if aio is DiskAio.IO_URING and not self._io_uring_works:
            aio = DiskAio.THREADS
        try:
            await self._qmp.blockdev_add(block.file_node(disk, fdset=fdset, is_block_special=is_block_special, aio=aio))
        except QmpCommandFailed as error:
            if aio is not DiskAio.IO_URING:
                raise
            # The kernel or QEMU may lack io_uring, or a seccomp filter may refuse it.
            await self._qmp.blockdev_add(
                block.file_node(disk, fdset=fdset, is_block_special=is_block_special, aio=DiskAio.THREADS)
            )
            self._io_uring_works = False
            log.warning("io_uring does not work here, disks use threads", extra={"error": str(error)})

    async def _remove_node(self, disk: BlockDevice) -> None:
        """QEMU has closed the disk. May be called again after an error."""
        await self._qmp.blockdev_del(node_name(disk.id))
        fdset = self._fdsets.pop(disk.id, None)
        if fdset is not None:
            with suppress(QmpCommandFailed):  # QEMU itself removes a set that is no longer open
                await self._qmp.remove_fd(fdset)

    async def _plug_scsi(self, disk: BlockDevice) -> GuestLocation:
        controller = await self._bridges.locate(block.SCSI_QDEV)
        index = next((number for number in range(block.MAX_SCSI_DISKS) if number not in self._scsi_disks), None)
        if index is None:
            raise ResourceExhausted(f"plug {disk.id!r}: the controller has all its {block.MAX_SCSI_DISKS} disks")
        await self._qmp.device_add("scsi-hd", qdev_id(disk.id), block.scsi_disk(disk, index))
        self._scsi_disks[index] = disk.id
        return GuestLocation(pci_path=controller.pci_path, scsi_address=block.scsi_address(index))


def _open_disk(disk: BlockDevice) -> int:
    """A descriptor of the disk. Raises FailedPrecondition when its path is neither a file nor a block device."""
    with os_errors(f"plug {disk.id!r}: {disk.path!r}"):
        mode = os.stat(disk.path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise FailedPrecondition(f"plug {disk.id!r}: {disk.path!r} is neither a file nor a block device")
        return os.open(disk.path, (os.O_RDONLY if disk.read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOCTTY)
