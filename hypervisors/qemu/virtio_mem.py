"""Memory that comes and goes in small blocks: the size of a virtio-mem device is asked for, and the guest follows.

QEMU only passes the wish on (`requested-size`); what the guest has plugged is `size`. Source: QEMU's qapi/qom.json and
hw/virtio/virtio-mem.c; MEMORY_DEVICE_SIZE_CHANGE comes at most once a second, the last change always.
"""

import asyncio

from hypervisors.qemu.memory import VIRTIO_MEM_ID
from hypervisors.qemu.qmp import Monitor, QmpError, QmpEvent
from pyshim.model.errors import DeadlineExceeded

STALL_TIMEOUT_S = 15.0
"""Seconds without a block moved: the guest has no driver, or memory it cannot give back."""
TOTAL_TIMEOUT_S = 120.0
"""Seconds for the whole change, blocks moving or not."""
SHRINK_STALL_TIMEOUT_S, SHRINK_TOTAL_TIMEOUT_S = 3.0, 5.0
"""The same when the VM shrinks. Only a container that needs more memory waits for the end of it, so it is short; the
rest is asked for again later."""
_PATH = f"/machine/peripheral/{VIRTIO_MEM_ID}"


async def resize_virtio_mem(monitor: Monitor, wanted_mib: int, stall_timeout_s: float | None = None) -> int:
    """The MiB the device now holds: `wanted_mib`, or more where the guest has not given everything back in its time.

    Raises DeadlineExceeded when the guest does not take what it is given. In both cases the wish is then what there
    is, so that nothing changes later by itself.
    """
    wanted_bytes = wanted_mib << 20
    had_bytes = now_bytes = await _size_bytes(monitor)
    shrinks = wanted_bytes < now_bytes
    stall_s = stall_timeout_s or (SHRINK_STALL_TIMEOUT_S if shrinks else STALL_TIMEOUT_S)
    if now_bytes != wanted_bytes:
        await monitor.qom_set(_PATH, "requested-size", wanted_bytes)
        total_s = SHRINK_TOTAL_TIMEOUT_S if shrinks else TOTAL_TIMEOUT_S
        now_bytes = await _await_size(monitor, now_bytes, wanted_bytes, stall_s, total_s)
    if now_bytes != wanted_bytes:
        await monitor.qom_set(_PATH, "requested-size", now_bytes)
    if now_bytes < wanted_bytes:
        raise DeadlineExceeded(
            f"grow the guest by {(wanted_bytes - had_bytes) >> 20} MiB of virtio-mem: "
            f"it took {(now_bytes - had_bytes) >> 20} MiB and then nothing for {stall_s:g} s"
        )
    return now_bytes >> 20


async def _await_size(monitor: Monitor, now_bytes: int, wanted_bytes: int, stall_s: float, total_s: float) -> int:
    """The device's size once it is `wanted_bytes`, or once the guest has had its time."""
    try:
        async with asyncio.timeout(total_s):
            while now_bytes != wanted_bytes:
                with monitor.expecting(_has_a_size) as size_event:
                    size_bytes = await _size_bytes(monitor)
                    if abs(wanted_bytes - size_bytes) < abs(wanted_bytes - now_bytes):
                        now_bytes = size_bytes
                        continue
                    async with asyncio.timeout(stall_s):
                        await size_event
    except TimeoutError:
        return await _size_bytes(monitor)
    return now_bytes


def _has_a_size(event: QmpEvent) -> bool:
    return event.name == "MEMORY_DEVICE_SIZE_CHANGE" and event.data.get("id") == VIRTIO_MEM_ID


async def _size_bytes(monitor: Monitor) -> int:
    size = await monitor.qom_get(_PATH, "size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise QmpError(f"ask qemu for the size of {VIRTIO_MEM_ID!r}: no number in its answer")
    return size
