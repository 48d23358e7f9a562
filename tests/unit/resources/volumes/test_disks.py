"""The disks that the block_device_* keys give, and keys that contradict each other."""

from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.vm import BlockDevice, DiskAio, DiskBus, DiskCache, GuestLocation, ScsiController, VhostUserBackend
from pyshim.resources.volumes.plan.disks import disk, guest_address, guest_driver, scsi_controller, vhost_user_disk
from tests.fakes.inputs import config


def planned(config: Config, **changes: Any) -> BlockDevice:
    return disk(config, **{"device_id": "blk-1", "path": "/dev/vg/lv", "read_only": False, **changes})


def test_the_defaults_are_katas() -> None:
    found = planned(config())

    assert found.tuning.bus is DiskBus.VIRTIO_SCSI
    assert found.tuning.aio is DiskAio.IO_URING
    assert found.tuning.cache == DiskCache(direct=False, no_flush=False)
    assert (found.tuning.queues, found.tuning.queue_size) == (1, 128)
    assert (found.serial, found.iothread) == ("blk-1", "")


def test_the_cache_keys_count_only_when_they_are_set() -> None:
    wishes = {"block_device_cache_direct": True, "block_device_cache_noflush": True}

    assert planned(config(**wishes)).tuning.cache == DiskCache(direct=False, no_flush=False)
    assert planned(config(**wishes, block_device_cache_set=True)).tuning.cache == DiskCache(direct=True, no_flush=True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"enable_iothreads": True}, ""),
        ({"enable_iothreads": True, "block_device_driver": "virtio-blk"}, ""),
        ({"indep_iothreads": 1, "block_device_driver": "virtio-blk"}, "indep0"),
        ({"indep_iothreads": 3}, ""),
    ],
    ids=["scsi", "blk-without", "blk-independent", "scsi-independent"],
)
def test_only_virtio_blk_disks_have_independent_io_threads(keys: dict[str, Any], expected: str) -> None:
    assert planned(config(**keys)).iothread == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"num_queues": 2, "queue_size": 64}, ScsiController(queues=2, queue_size=64, iothread="")),
        ({"enable_iothreads": True}, ScsiController(queues=1, queue_size=128, iothread="scsi")),
        ({"block_device_driver": "virtio-blk"}, None),
    ],
    ids=["plain", "iothread", "blk"],
)
def test_a_vm_has_a_controller_where_volumes_become_scsi_disks(
    keys: dict[str, Any], expected: ScsiController | None
) -> None:
    assert scsi_controller(config(**keys)) == expected


def test_independent_io_threads_share_the_disks() -> None:
    threads = config(indep_iothreads=4, block_device_driver="virtio-blk-pci")

    named = {planned(threads, device_id=f"blk-{number}").iothread for number in range(64)}

    assert named == {"indep0", "indep1", "indep2", "indep3"}


@pytest.mark.parametrize(
    ("logical", "physical", "expected"),
    [(0, 0, (0, 0)), (512, 0, (512, 0)), (4096, 0, (4096, 4096)), (512, 4096, (512, 4096))],
)
def test_a_large_logical_sector_implies_the_physical_one(
    logical: int, physical: int, expected: tuple[int, int]
) -> None:
    tuning = planned(
        config(block_device_logical_sector_size=logical, block_device_physical_sector_size=physical)
    ).tuning

    assert (tuning.logical_block_bytes, tuning.physical_block_bytes) == expected


def test_the_agent_is_told_the_scsi_address_where_there_is_one() -> None:
    behind_bridge = GuestLocation(pci_path="02/01")
    on_controller = GuestLocation(pci_path="02/01", scsi_address="0:3")

    assert (guest_driver(behind_bridge), guest_address(behind_bridge)) == ("blk", "02/01")
    assert (guest_driver(on_controller), guest_address(on_controller)) == ("scsi", "0:3")


def test_a_served_disk_is_virtio_blk_whatever_other_disks_are() -> None:
    found = vhost_user_disk(config(vhost_user_reconnect_timeout_sec=3, num_queues=2), device_id="d", socket="/s")

    assert (found.path, found.read_only, found.vhost_user) == ("/s", False, VhostUserBackend(reconnect_s=3))
    assert (found.tuning.bus, found.tuning.queues) == (DiskBus.VIRTIO_BLK, 2)


def test_a_confidential_guest_has_no_memory_for_a_program_of_the_host() -> None:
    with pytest.raises(FailedPrecondition, match="plug '/s': a confidential guest"):
        vhost_user_disk(config(confidential_guest=True), device_id="d", socket="/s")
