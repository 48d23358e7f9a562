"""Disks: the arguments of the QMP commands that plug them, and the SCSI controller of the argv. Pure.

The order of the commands is Kata's. Plug: [object-add iothread], blockdev-add, device_add. Unplug: device_del, its
event, blockdev-del. All SCSI disks of a VM are behind one virtio-scsi controller.
"""

from hypervisors.qemu.options import Args, chardev_id, node_name, option, qdev_id
from pyshim.model.errors import InvalidArgument
from pyshim.model.vm import BlockDevice, DiskAio, DiskBus, ScsiController

SCSI_QDEV = qdev_id("scsi0")
SCSI_BUS = f"{SCSI_QDEV}.0"
_LUNS = 256
_SCSI_IDS = 256
MAX_SCSI_DISKS = _LUNS * _SCSI_IDS
_SERIAL_CHARS = 20

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
