"""Resizes a virtio-mem device, whose memory the guest plugs and unplugs in small blocks.

QEMU passes `requested-size` to the guest; `size` is what the guest has plugged. QEMU sends MEMORY_DEVICE_SIZE_CHANGE at
most once a second, and always for the last change. Source: QEMU's qapi/qom.json and hw/virtio/virtio-mem.c.
"""

import asyncio

from hypervisors.qemu.memory import VIRTIO_MEM_ID
from hypervisors.qemu.qmp import Monitor, QmpError, QmpEvent
from pyshim.model.errors import DeadlineExceeded

STALL_TIMEOUT_S = 15.0
"""Seconds without a change of the size: the guest has no driver, or cannot give memory back."""
TOTAL_TIMEOUT_S = 120.0
"""Seconds for the whole change."""
SHRINK_STALL_TIMEOUT_S, SHRINK_TOTAL_TIMEOUT_S = 3.0, 5.0
"""The same when the VM shrinks. They are short, since a container that needs more memory waits meanwhile; the caller
tries again later to shrink the rest."""
_PATH = f"/machine/peripheral/{VIRTIO_MEM_ID}"


async def resize_virtio_mem(monitor: Monitor, wanted_mib: int, stall_timeout_s: float | None = None) -> int:
    """The MiB that the guest now has plugged: `wanted_mib`, or more if it has not given all back in time.

    Raises DeadlineExceeded when the guest does not plug all of it in time. In both cases `requested-size` is then set
    to the current size, so that it does not change later.
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
    """The device's size when it is `wanted_bytes`, or when the time is over."""
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
