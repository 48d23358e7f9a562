"""How a volume becomes a disk, by the configuration's block_device_* keys, and its description for the guest. Pure."""

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import GuestContainer, GuestDevice
from pyshim.model.plans import DiskUse
from pyshim.model.vm import (
    BlockDevice,
    DiskAio,
    DiskBus,
    DiskCache,
    DiskTuning,
    GuestLocation,
    ScsiController,
    VhostUserBackend,
)

_BUSES = {
    "virtio-scsi": DiskBus.VIRTIO_SCSI,
    "virtio-blk": DiskBus.VIRTIO_BLK,
    "virtio-blk-pci": DiskBus.VIRTIO_BLK,
}
_QEMUS_BLOCK_BYTES = 512


def disk(config: Config, *, device_id: str, path: str, read_only: bool, discard: bool = False) -> BlockDevice:
    """The disk over the host's `path`."""
    tuning = disk_tuning(config)
    return BlockDevice(
        id=device_id,
        path=path,
        read_only=read_only,
        discard=discard,
        serial=device_id,
        iothread=_iothread(config, device_id) if tuning.bus is DiskBus.VIRTIO_BLK else "",
        tuning=tuning,
    )


def vhost_user_disk(config: Config, *, device_id: str, socket: str) -> BlockDevice:
    """The disk that another program serves over `socket`: virtio-blk, and writable or not as that program says.

    Raises FailedPrecondition in a confidential guest, whose memory no other program can read.
    """
    if config.hypervisor.confidential_guest:
        raise FailedPrecondition(f"plug '{socket}': a confidential guest has no memory to share with its program")
    return BlockDevice(
        id=device_id,
        path=socket,
        read_only=False,
        discard=False,
        serial="",
        iothread="",
        tuning=replace(disk_tuning(config), bus=DiskBus.VIRTIO_BLK),
        vhost_user=VhostUserBackend(reconnect_s=config.hypervisor.vhost_user_reconnect_timeout_s),
    )


def disk_tuning(config: Config) -> DiskTuning:
    hypervisor = config.hypervisor
    is_set = hypervisor.block_device_cache_set
    cache = DiskCache(
        direct=is_set and hypervisor.block_device_cache_direct,
        no_flush=is_set and hypervisor.block_device_cache_noflush,
    )
    logical = hypervisor.block_device_logical_sector_size
    physical = hypervisor.block_device_physical_sector_size
    return DiskTuning(
        # Only a remote VM's configuration has other values, without effect: its block devices are refused when plugged.
        bus=_BUSES.get(hypervisor.block_device_driver, DiskBus.VIRTIO_SCSI),
        aio=DiskAio(hypervisor.block_device_aio),
        cache=cache,
        logical_block_bytes=logical,
        physical_block_bytes=physical or (logical if logical > _QEMUS_BLOCK_BYTES else 0),
        queues=hypervisor.num_queues,
        queue_size=hypervisor.queue_size,
    )


def scsi_controller(config: Config) -> ScsiController | None:
    """The one a VM boots with where its volumes become SCSI disks.

    It is not plugged with the first disk: kata-agent looks for a disk only once, and a controller that the guest is
    still setting up then finds nothing.
    """
    hypervisor = config.hypervisor
    if _BUSES[hypervisor.block_device_driver] is not DiskBus.VIRTIO_SCSI:
        return None
    return ScsiController(
        queues=hypervisor.num_queues,
        queue_size=hypervisor.queue_size,
        iothread="scsi" if hypervisor.enable_iothreads else "",
    )


def _iothread(config: Config, device_id: str) -> str:
    """One of the independent threads, always the same for the same disk."""
    count = config.hypervisor.indep_iothreads
    return f"indep{int(digest(device_id), 16) % count}" if count else ""


def guest_driver(location: GuestLocation) -> str:
    """The agent's word for a disk at this location."""
    return "scsi" if location.scsi_address else "blk"


def guest_address(location: GuestLocation) -> str:
    """Its address for the agent: SCSI `ID:LUN`, or the PCI path."""
    return location.scsi_address or location.pci_path


def with_disks(guest: GuestContainer, plugged: Sequence[tuple[DiskUse, GuestLocation]]) -> GuestContainer:
    """`guest` with what plugged disks add to it: storages, mounted before its others, and devices."""
    storages, devices = [], []
    for use, location in plugged:
        driver, address = guest_driver(location), guest_address(location)
        if use.storage is not None:
            storages.append(replace(use.storage, driver=driver, source=address))
        else:
            devices.append(
                GuestDevice(id=address, type=driver, vm_path="", container_path=use.container_path, options=())
            )
    return replace(guest, storages=(*storages, *guest.storages), devices=(*guest.devices, *devices))


def digest(text: str) -> str:
    """A short name for `text`, fit for device ids and file names."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
