"""The guest's memory: QEMU's options for RAM, NUMA nodes, DIMMs and virtio-mem; its resizing, and its dump to a file.

The guest plugs and unplugs virtio-mem in small blocks. QEMU passes `requested-size` to the guest; `size` is what the
guest has plugged. QEMU sends MEMORY_DEVICE_SIZE_CHANGE at most once a second, and always for the last change. Source:
QEMU's qapi/qom.json and hw/virtio/virtio-mem.c.
"""

import asyncio
import os
import time
from collections.abc import Sequence

from msgspec.structs import replace

from hypervisors.qemu.options import Args, Fields, object_args, option
from hypervisors.qemu.qmp import Monitor, QmpError, QmpEvent, QmpTimeout
from pyshim.host.fds import OwnedFd
from pyshim.model.errors import DeadlineExceeded, ResourceExhausted
from pyshim.model.host_facts import cpuset_text
from pyshim.model.units import MIB
from pyshim.model.vm import GuestNode, MemoryBacking, MemoryConfig, MemoryDump

RAM_ID = "ram0"
VIRTIO_MEM_ID = "virtiomem0"
_VIRTIO_MEM_UNIT_MIB = 4
"""The size of virtio-mem is rounded down to a multiple of this, as in Kata. It is a multiple of every block size that
QEMU chooses, for 4 KiB pages and for 2 MiB huge pages."""


def size(config: MemoryConfig, *, hotplug: bool, pmem_bytes: int) -> Args:
    """-m: the size of RAM, and the room to grow. DIMMs and a pmem image take a slot each, virtio-mem takes none."""
    room_mib = max(config.max_mib - config.boot_mib, 0) if hotplug else 0
    if config.virtio_mem:
        room_mib, slots = virtio_mem_mib(config) if hotplug else 0, 0
    else:
        slots = config.slots if room_mib else 0
    if pmem_bytes:
        room_mib += -(-pmem_bytes // MIB)
        slots += 1
    boot = f"{config.boot_mib}M"
    offers_room = slots or (config.virtio_mem and room_mib)
    return ("-m", option(boot, {"slots": slots, "maxmem": f"{config.boot_mib + room_mib}M"}) if offers_room else boot)


def virtio_mem_mib(config: MemoryConfig) -> int:
    """The size of the virtio-mem device in MiB; 0 without one."""
    room_mib = max(config.max_mib - config.boot_mib, 0) if config.virtio_mem else 0
    return room_mib // _VIRTIO_MEM_UNIT_MIB * _VIRTIO_MEM_UNIT_MIB


def virtio_mem(config: MemoryConfig) -> Args:
    """The virtio-mem device, with no memory plugged. `reserve=off`: the host gives memory only as the guest gets it.

    `prealloc` is set on the device, which touches what it plugs; the backend would touch its whole size at once.
    """
    fields = memory_backend(config, backend_id="virtiomem", size_mib=virtio_mem_mib(config))
    prealloc = fields.pop("prealloc", False)
    backend = object_args({**fields, "size": f"{virtio_mem_mib(config)}M", "reserve": False})
    device: Fields = {"id": VIRTIO_MEM_ID, "memdev": "virtiomem", "requested-size": 0}
    return (*backend, "-device", option("virtio-mem-pci", device | ({"prealloc": True} if prealloc else {})))


def memory_backend(config: MemoryConfig, *, backend_id: str, size_mib: int) -> Fields:
    """Arguments of object-add for a backend of guest RAM; `qom-type` is its kind."""
    kinds: dict[MemoryBacking, Fields] = {
        MemoryBacking.PRIVATE: {"qom-type": "memory-backend-ram"},
        MemoryBacking.SHARED_MEMFD: {"qom-type": "memory-backend-memfd", "share": True},
        # Not mem-path=/dev/hugepages: if that is not a hugetlbfs, QEMU makes an ordinary file of the RAM's size.
        MemoryBacking.HUGEPAGES: {"qom-type": "memory-backend-memfd", "hugetlb": True, "share": True},
    }
    fields: Fields = {**kinds[config.backing], "id": backend_id, "size": size_mib << 20}
    if config.host_nodes:
        # QEMU can prefer one node; for several it has only `bind`, which allows no others.
        policy = "preferred" if len(config.host_nodes) == 1 else "bind"
        fields |= {"host-nodes": list(config.host_nodes), "policy": policy}
    return {**fields, "prealloc": True} if config.prealloc else fields


def ram(config: MemoryConfig) -> Args:
    return _ram(config, RAM_ID, config.boot_mib)


def ram_in_file(config: MemoryConfig, fd: int, *, is_saved: bool) -> Args:
    """RAM in the open file `fd`, which has its size. QEMU opens the file again, by a name that needs no directory.

    `is_saved`: it is a saved machine's file, for several VMs. QEMU only reads it; the guest's writes are private.
    """
    fields: Fields = {"id": RAM_ID, "size": f"{config.boot_mib}M", "mem-path": f"/proc/self/fd/{fd}"}
    fields |= {"share": False, "readonly": True, "rom": False} if is_saved else {"share": True}
    return ("-object", option("memory-backend-file", fields))


def numa(config: MemoryConfig, nodes: Sequence[GuestNode]) -> Args:
    """The guest's NUMA nodes: memory, vCPUs and distances."""
    args: list[str] = []
    for number, node in enumerate(nodes):
        own = replace(config, host_nodes=node.memory_nodes)
        backend_id = f"ram{number}"
        fields: Fields = {"nodeid": number, "memdev": backend_id, "cpus": cpuset_text(node.vcpus).split(",")}
        args += (*_ram(own, backend_id, node.memory_mib), "-numa", option("node", fields))
    for src, node in enumerate(nodes):
        for dst, distance in enumerate(node.distances):
            if src != dst:
                args += ("-numa", option("dist", {"src": src, "dst": dst, "val": distance}))
    return tuple(args)


def _ram(config: MemoryConfig, backend_id: str, size_mib: int) -> Args:
    fields = memory_backend(config, backend_id=backend_id, size_mib=size_mib)
    return object_args({**fields, "size": f"{size_mib}M"})


STALL_TIMEOUT_S = 15.0
"""Seconds without a change of the size: the guest has no driver, or cannot give memory back."""
TOTAL_TIMEOUT_S = 120.0
"""Seconds for the whole change."""
SHRINK_STALL_TIMEOUT_S, SHRINK_TOTAL_TIMEOUT_S = 3.0, 5.0
"""The same when the VM shrinks. They are short, since a container that needs more memory waits meanwhile; the caller
tries again later to shrink the rest."""
_VIRTIO_MEM_PATH = f"/machine/peripheral/{VIRTIO_MEM_ID}"


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
        await monitor.qom_set(_VIRTIO_MEM_PATH, "requested-size", wanted_bytes)
        total_s = SHRINK_TOTAL_TIMEOUT_S if shrinks else TOTAL_TIMEOUT_S
        now_bytes = await _await_size(monitor, now_bytes, wanted_bytes, stall_s, total_s)
    if now_bytes != wanted_bytes:
        await monitor.qom_set(_VIRTIO_MEM_PATH, "requested-size", now_bytes)
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
    size = await monitor.qom_get(_VIRTIO_MEM_PATH, "size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise QmpError(f"ask qemu for the size of {VIRTIO_MEM_ID!r}: no number in its answer")
    return size


SPARE_BYTES = 256 * MIB
"""Bytes that a dump leaves free on the host's file system, less the ELF headers."""
_DUMP_FD_NAME = "memory-dump"
_DUMP_BASE_S, _DUMP_S_PER_BYTE = 60.0, 1 / (20 * MIB)
"""The time limit of a dump: a minute, and the time of a slow disk, which writes 20 MiB a second."""


async def dump_memory(monitor: Monitor, plan: MemoryDump, sandbox_id: str) -> str:
    """The paused guest's memory is in a file, whose path is returned. Without `plan.paging` addresses are physical.

    Raises ResourceExhausted when the file system has no room, QmpError, OSError. No file is left after an error.
    """
    size = await monitor.memory_size()
    size_bytes = sum(size)
    directory = f"{plan.directory}/{sandbox_id}"
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if free_bytes(directory) < size_bytes + SPARE_BYTES:
        raise ResourceExhausted(
            f"dump memory of vm {sandbox_id!r}: {directory!r} has no room for {size_bytes >> 20} MiB and "
            f"{SPARE_BYTES >> 20} MiB to spare"
        )
    path = f"{directory}/vmcore-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.elf"
    with OwnedFd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as file:
        try:
            await monitor.getfd(_DUMP_FD_NAME, file.fileno())
            await _write_dump(monitor, plan.paging, _DUMP_BASE_S + size_bytes * _DUMP_S_PER_BYTE)
        except BaseException:
            os.unlink(path)
            raise
    return path


async def _write_dump(monitor: Monitor, paging: bool, timeout_s: float) -> None:
    def is_end(event: QmpEvent) -> bool:
        return event.name == "DUMP_COMPLETED"

    with monitor.expecting(is_end) as ended:
        await monitor.dump_guest_memory(_DUMP_FD_NAME, paging=paging)
        try:
            async with asyncio.timeout(timeout_s):
                event = await ended
        except TimeoutError:
            raise QmpTimeout(f"dump memory: not done within {timeout_s:g} s") from None
    if error := event.text("error"):
        raise QmpError(f"dump memory: {error}")


def free_bytes(directory: str) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
