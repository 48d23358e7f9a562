"""Disks for tests: plain virtio-blk ones, and whatever a test changes in them."""

from typing import Any

from msgspec.structs import fields, replace

from pyshim.model.vm import BlockDevice, DiskAio, DiskBus, DiskCache, DiskTuning

PLAIN = DiskTuning(
    bus=DiskBus.VIRTIO_BLK,
    aio=DiskAio.THREADS,
    cache=DiskCache(direct=False, no_flush=False),
    logical_block_bytes=0,
    physical_block_bytes=0,
    queues=0,
    queue_size=0,
)


def disk(name: str, path: object, **changes: Any) -> BlockDevice:
    """Fields of `changes` are the disk's or, where they are none of its, its tuning's."""
    plain = BlockDevice(id=name, path=str(path), read_only=False, discard=False, serial="", iothread="", tuning=PLAIN)
    own = {key: value for key, value in changes.items() if key in {field.name for field in fields(BlockDevice)}}
    tuning = {key: value for key, value in changes.items() if key not in own}
    return replace(plain, tuning=replace(PLAIN, **tuning), **own)
