"""The disks of one VM: the arguments of the QMP commands that plug them, and the disks that are plugged.

A disk is a file or a block device that the shim opens, or served by a program of the host (vhost-user). While QEMU adds
a disk of the second kind, it waits for the program without a limit, and serves neither guest nor monitor. So the shim
makes the connection and QEMU gets a copy: when the program does not answer, the shim shuts the connection down, which
ends QEMU's wait. With `reconnect_s` QEMU has to connect by itself, and only the program can end the wait.
"""

import errno
import logging
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress

from hypervisors.qemu.options import Args, chardev_id, node_name, option, qdev_id
from hypervisors.qemu.pci import Bridges
from hypervisors.qemu.qmp import Monitor, QmpCommandFailed, QmpTimeout
from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.host.threads import in_own_thread
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ShimError,
    Unavailable,
)
from pyshim.model.vm import BlockDevice, DiskAio, DiskBus, GuestLocation, ScsiController

log = logging.getLogger(__name__)


SCSI_QDEV = qdev_id("scsi0")
SCSI_BUS = f"{SCSI_QDEV}.0"
_LUNS = 256
_SCSI_IDS = 256
MAX_SCSI_DISKS = _LUNS * _SCSI_IDS
_SERIAL_CHARS = 20

ANSWER_TIMEOUT_S = 10.0
"""Seconds for the program to answer QEMU; the whole VM stands still meanwhile. After 25 s of that a guest took longer
than UNPLUG_TIMEOUT_S to release the disk."""

Fields = dict[str, object]


def file_node(disk: BlockDevice, *, fdset: int, is_block_special: bool, aio: DiskAio) -> Fields:
    """Arguments of blockdev-add: a raw format node over the file or device, with the disk's node name.

    QEMU takes it from `fdset`, opened by the shim: QEMU's user may not be able to open it.
    """
    cache = {"direct": disk.tuning.cache.direct, "no-flush": disk.tuning.cache.no_flush}
    return {
        "driver": "raw",
        "node-name": node_name(disk.id),
        "read-only": disk.read_only,
        "cache": cache,
        "discard": "unmap" if disk.discard else "ignore",
        "file": {
            "driver": "host_device" if is_block_special else "file",
            "filename": f"/dev/fdset/{fdset}",
            "read-only": disk.read_only,
            "aio": str(aio),
            "cache": dict(cache),
            "discard": "unmap" if disk.discard else "ignore",
        },
    }


def virtio_blk(disk: BlockDevice) -> Fields:
    """Fields of a virtio-blk-pci without bus and address."""
    fields: Fields = {"drive": node_name(disk.id), "share-rw": True, "romfile": ""}
    if disk.tuning.queues:
        fields["num-queues"] = disk.tuning.queues
    if disk.tuning.queue_size:
        fields["queue-size"] = disk.tuning.queue_size
    if disk.iothread:
        fields["iothread"] = iothread_id(disk.iothread)
    if disk.discard:
        fields["discard"] = True
    return fields | _identity(disk)


def vhost_user_chardev(disk: BlockDevice, version: tuple[int, ...], *, fd_name: str = "") -> Fields:
    """Arguments of chardev-add, for QEMU `version`, that connect it to the program which serves the disk.

    With `fd_name` QEMU uses the connection that it got as that name, and cannot connect again by itself. QEMU 9.2
    introduced the time between attempts in milliseconds, 10.2 removed the one in seconds.
    """
    if disk.vhost_user is None:
        raise InvalidArgument(f"plug {disk.id!r}: no vhost-user program serves it")
    address = {"type": "fd", "data": {"str": fd_name}} if fd_name else {"type": "unix", "data": {"path": disk.path}}
    data: Fields = {"addr": address, "server": False}
    if disk.vhost_user.reconnect_s and version >= (9, 2):
        data["reconnect-ms"] = disk.vhost_user.reconnect_s * 1000
    elif disk.vhost_user.reconnect_s:
        data["reconnect"] = disk.vhost_user.reconnect_s
    return {"id": chardev_id(disk.id), "backend": {"type": "socket", "data": data}}


def vhost_user_blk(disk: BlockDevice) -> Fields:
    """Fields of a vhost-user-blk-pci without bus and address.

    One queue by default: QEMU's default is a queue per vCPU, which a program with fewer queues refuses.
    """
    fields: Fields = {"chardev": chardev_id(disk.id), "num-queues": disk.tuning.queues or 1}
    if disk.tuning.queue_size:
        fields["queue-size"] = disk.tuning.queue_size
    return fields


def scsi_controller(controller: ScsiController) -> Args:
    """The SCSI controller with its I/O thread, for the argv."""
    args: list[str] = []
    fields: dict[str, str | int | bool | list[int]] = {"id": SCSI_QDEV, "romfile": ""}
    if controller.queues:
        fields["num_queues"] = controller.queues
    if controller.queue_size:
        fields["virtqueue_size"] = controller.queue_size
    if controller.iothread:
        fields["iothread"] = iothread_id(controller.iothread)
        args += ("-object", option("iothread", {"id": iothread_id(controller.iothread)}))
    return (*args, "-device", option("virtio-scsi-pci", fields))


def scsi_disk(disk: BlockDevice, index: int) -> Fields:
    """Fields of a scsi-hd. `index` is its number on the controller: SCSI id * 256 + LUN, as in Kata."""
    scsi_id, lun = divmod(index, _LUNS)
    fields: Fields = {"drive": node_name(disk.id), "bus": SCSI_BUS, "scsi-id": scsi_id, "lun": lun, "share-rw": True}
    return fields | _identity(disk)


def scsi_address(index: int) -> str:
    """`ID:LUN`, the name that the disk has in the agent's calls."""
    scsi_id, lun = divmod(index, _LUNS)
    return f"{scsi_id}:{lun}"


def _identity(disk: BlockDevice) -> Fields:
    fields: Fields = {}
    if disk.tuning.logical_block_bytes:
        fields["logical_block_size"] = disk.tuning.logical_block_bytes
    if disk.tuning.physical_block_bytes:
        fields["physical_block_size"] = disk.tuning.physical_block_bytes
    if disk.serial:
        fields["serial"] = disk.serial[:_SERIAL_CHARS]
    return fields


def iothread_id(name: str) -> str:
    return node_name(f"iothread-{name}")


def is_scsi(disk: BlockDevice) -> bool:
    return disk.tuning.bus is DiskBus.VIRTIO_SCSI


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
            if is_scsi(disk):
                return await self._plug_scsi(disk)
            return await self._bridges.plug("virtio-blk-pci", disk.id, virtio_blk(disk))
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
            await self._qmp.object_add({"qom-type": "iothread", "id": iothread_id(name)})
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
            await self._qmp.blockdev_add(file_node(disk, fdset=fdset, is_block_special=is_block_special, aio=aio))
        except QmpCommandFailed as error:
            if aio is not DiskAio.IO_URING:
                raise
            # The kernel or QEMU may lack io_uring, or a seccomp filter may refuse it.
            await self._qmp.blockdev_add(
                file_node(disk, fdset=fdset, is_block_special=is_block_special, aio=DiskAio.THREADS)
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
        controller = await self._bridges.locate(SCSI_QDEV)
        index = next((number for number in range(MAX_SCSI_DISKS) if number not in self._scsi_disks), None)
        if index is None:
            raise ResourceExhausted(f"plug {disk.id!r}: the controller has all its {MAX_SCSI_DISKS} disks")
        await self._qmp.device_add("scsi-hd", qdev_id(disk.id), scsi_disk(disk, index))
        self._scsi_disks[index] = disk.id
        return GuestLocation(pci_path=controller.pci_path, scsi_address=scsi_address(index))


def _open_disk(disk: BlockDevice) -> int:
    """A descriptor of the disk.

    Raises FailedPrecondition when its path is neither a file nor a block device, and for a device that the host has
    mounted or that another driver has claimed. Another VM may have it: whether it can be shared is the pods' affair.
    """
    with os_errors(f"plug {disk.id!r}: {disk.path!r}"):
        mode = os.stat(disk.path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise FailedPrecondition(f"plug {disk.id!r}: {disk.path!r} is neither a file nor a block device")
        flags = (os.O_RDONLY if disk.read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOCTTY
        if disk.tuning.cache.direct:
            flags |= os.O_DIRECT  # QEMU since 9.1 uses a descriptor only if it was opened as the cache wants it
        if stat.S_ISBLK(mode):
            _check_unclaimed(disk, flags)
        return os.open(disk.path, flags)


def _check_unclaimed(disk: BlockDevice, flags: int) -> None:
    """Raises FailedPrecondition for a mounted or claimed block device. Source: open(2), O_EXCL without O_CREAT."""
    try:
        os.close(os.open(disk.path, flags | os.O_EXCL))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise FailedPrecondition(
            f"plug {disk.id!r}: {disk.path!r}: EBUSY (the host has mounted or claimed it)"
        ) from error


class VhostUserDisks:
    def __init__(self, monitor: Monitor, bridges: Bridges) -> None:
        self._qmp = monitor
        self._bridges = bridges
        self._unanswered: set[str] = set()
        """Disks whose plug timed out; QEMU may have completed it since, or may yet."""

    async def plug(self, disk: BlockDevice) -> GuestLocation:
        """Raises Unavailable when the program cannot be reached, DeadlineExceeded when it does not answer.

        Also raises Unavailable while QEMU still has the disk of an earlier attempt that timed out.
        """
        if disk.id in self._unanswered:
            await self._remove_unanswered(disk)
        connection = (
            None if disk.vhost_user is None or disk.vhost_user.reconnect_s else connect_program(disk.id, disk.path)
        )
        try:
            await self._add_chardev(disk, connection)
            return await self._add_device(disk, connection)
        finally:
            # QEMU has its own copy. As long as this one is open, the program does not see QEMU's end.
            if connection is not None:
                connection.close()

    async def unplug(self, disk: BlockDevice) -> None:
        """The guest has released the disk and QEMU has closed the connection to the program."""
        await self._qmp.device_remove(qdev_id(disk.id))
        await self._qmp.chardev_remove(chardev_id(disk.id))

    async def _add_chardev(self, disk: BlockDevice, connection: socket.socket | None) -> None:
        fd_name = chardev_id(disk.id) if connection is not None else ""
        chardev = vhost_user_chardev(disk, self._qmp.version, fd_name=fd_name)
        if connection is not None:
            await self._qmp.getfd(fd_name, connection.fileno())
        try:
            await self._qmp.chardev_add(chardev)
        except QmpCommandFailed as error:
            if connection is not None:
                with suppress(ShimError):
                    await self._qmp.closefd(fd_name)
            raise Unavailable(f"plug {disk.id!r}: connect to {disk.path!r}: {error}") from error

    async def _add_device(self, disk: BlockDevice, connection: socket.socket | None) -> GuestLocation:
        try:
            fields = vhost_user_blk(disk)
            return await self._bridges.plug("vhost-user-blk-pci", disk.id, fields, ANSWER_TIMEOUT_S)
        except QmpTimeout as error:
            self._unanswered.add(disk.id)
            if connection is not None:
                with suppress(OSError):  # the program may have closed it
                    connection.shutdown(socket.SHUT_RDWR)
                with suppress(ShimError):
                    await self._remove(disk)
            raise DeadlineExceeded(
                f"plug {disk.id!r}: the program at {disk.path!r} does not answer: {error}"
            ) from error
        except ShimError:
            with suppress(ShimError):
                await self._qmp.chardev_remove(chardev_id(disk.id))
            raise

    async def _remove_unanswered(self, disk: BlockDevice) -> None:
        try:
            await self._remove(disk)
        except ShimError as error:
            raise Unavailable(
                f"plug {disk.id!r}: qemu still has it from an attempt that the program at {disk.path!r} did not "
                f"answer: {error} (hint: with vhost_user_reconnect_timeout_sec qemu waits until that program ends)"
            ) from error

    async def _remove(self, disk: BlockDevice) -> None:
        """QEMU has no part of the disk, even if its plug succeeded after the timeout; its slot is free."""
        await self.unplug(disk)
        self._bridges.free(disk.id)
        self._unanswered.discard(disk.id)


def connect_program(device_id: str, path: str) -> socket.socket:
    """A connection to the program that listens at `path`, for QEMU. Raises Unavailable."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # Non-blocking, so that a program with a full listen queue counts as unreachable.
        connection.connect(path)
        connection.setblocking(True)  # also for QEMU: the mode belongs to the open file
    except OSError as error:
        connection.close()
        raise Unavailable(f"plug {device_id!r}: connect to {path!r}: {describe_os_error(error)}") from error
    return connection
