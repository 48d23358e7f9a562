"""Dumps the memory of a guest whose kernel has panicked to an ELF file on the host."""

import asyncio
import os
import time

from hypervisors.qemu.qmp import Monitor, QmpError, QmpEvent, QmpTimeout
from pyshim.host.fds import OwnedFd
from pyshim.model.errors import ResourceExhausted
from pyshim.model.units import MIB
from pyshim.model.vm import MemoryDump

SPARE_BYTES = 256 * MIB
"""Bytes that a dump leaves free on the host's file system, less the ELF headers."""
_FD_NAME = "memory-dump"
_BASE_S, _S_PER_BYTE = 60.0, 1 / (20 * MIB)
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
            await monitor.getfd(_FD_NAME, file.fileno())
            await _write_dump(monitor, plan.paging, _BASE_S + size_bytes * _S_PER_BYTE)
        except BaseException:
            os.unlink(path)
            raise
    return path


async def _write_dump(monitor: Monitor, paging: bool, timeout_s: float) -> None:
    def is_end(event: QmpEvent) -> bool:
        return event.name == "DUMP_COMPLETED"

    with monitor.expecting(is_end) as ended:
        await monitor.dump_guest_memory(_FD_NAME, paging=paging)
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
