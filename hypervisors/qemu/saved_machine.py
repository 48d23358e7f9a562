"""Saves a machine in two files and lets other VMs continue from them.

The files are the guest's memory, sparse where the guest has not used it, and the state of the devices. The state is
QEMU's migration stream, from which `x-ignore-shared` leaves out the memory, the file of `-object memory-backend-file`.
A VM that continues gets its memory as a descriptor without a name. It maps the saved file privately; it gets a copy if
its QEMU cannot use a read-only file, or if another program maps its memory. Source: QEMU's docs/devel/migration
and docs/system/vm-templating.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from hypervisors.qemu.qmp import Monitor, QmpError
from pyshim.host.fds import OwnedFd
from pyshim.host.files import copy_sparse, copy_without_zeros
from pyshim.host.threads import thread_to_the_end
from pyshim.model.errors import ShimError
from pyshim.model.units import MIB
from pyshim.model.vm import LocalVm, MemoryBacking

MEMORY, STATE = "memory", "state"
_PAUSE_S = 0.005
"""Seconds between two queries of the progress. QEMU sends an event only if a capability is set."""
_FILE_URIS = (8, 2)
"""Since this version QEMU migrates to files by name; an older one uses a descriptor. Source: qapi/migration.json."""
_READ_ONLY_MEMORY = (8, 2)
"""Since this version QEMU makes RAM from a file that it may only read (`rom=off`). An older QEMU could change the file
from which other VMs continue. Source: QEMU's qapi/qom.json."""
_FD_NAME = "saved-machine"
_ENDS = ("completed", "failed", "cancelled")


def empty_memory(config: LocalVm) -> OwnedFd:
    """A memfd of the size of the VM's RAM. Raises OSError."""
    memory = OwnedFd(os.memfd_create("guest-memory", os.MFD_CLOEXEC))
    try:
        os.truncate(memory.fileno(), config.memory.boot_mib * MIB)
    except BaseException:
        memory.close()
        raise
    return memory


def saved_memory(config: LocalVm) -> OwnedFd | None:
    """The saved machine's memory file, open for reading; None if the VM needs a copy. Raises OSError.

    It needs a copy if other programs map its memory, and with `reclaim`, which has QEMU punch holes in the file.
    """
    memory = config.memory
    if not config.saved_machine or memory.backing is not MemoryBacking.PRIVATE or memory.reclaim:
        return None
    saved = _open(f"{config.saved_machine}/{MEMORY}", os.O_RDONLY)
    found = os.fstat(saved.fileno())
    if found.st_mode & stat.S_IROTH and found.st_size == memory.boot_mib * MIB:
        return saved
    saved.close()
    return None


async def fill_memory(memory: OwnedFd, directory: str) -> None:
    """The saved machine's memory is copied into `memory`, which was empty. Raises OSError.

    QEMU may have mapped `memory` already: it reads nothing there before the machine continues.
    """
    with _open(f"{directory}/{MEMORY}", os.O_RDONLY) as saved:
        await thread_to_the_end(copy_sparse, saved, memory)


async def save_machine(monitor: Monitor, memory: OwnedFd, directory: str) -> None:
    """The two files are in `directory`; the paused VM cannot run again. Raises QmpError, OSError.

    The memory file is readable for all users if QEMU can use it that way. Only root can enter the directory, so that
    serves only a QEMU that got a descriptor of the file.
    """
    with _open(f"{directory}/{STATE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as state:
        await monitor.leave_out_shared_memory()
        async with _migration_uri(monitor, state) as uri:
            await monitor.migrate(uri)
            await _await_completion(monitor, "save machine")
    with _open(f"{directory}/{MEMORY}", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as saved:
        await thread_to_the_end(copy_without_zeros, memory, saved)
        if monitor.version >= _READ_ONLY_MEMORY:
            os.fchmod(saved.fileno(), 0o644)


async def continue_machine(monitor: Monitor, directory: str) -> None:
    """The VM, started with `-incoming defer` and the memory, is paused in the state of the saved machine.

    Raises OSError, QmpError, or QmpGone when QEMU exits because the state is of another machine.
    """
    with _open(f"{directory}/{STATE}", os.O_RDONLY) as state:
        await monitor.leave_out_shared_memory()
        async with _migration_uri(monitor, state) as uri:
            await monitor.migrate_incoming(uri)
            await _await_completion(monitor, "continue machine")


def _open(path: str, flags: int) -> OwnedFd:
    return OwnedFd(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


@asynccontextmanager
async def _migration_uri(monitor: Monitor, file: OwnedFd) -> AsyncIterator[str]:
    """What `file` is called in QEMU, which has no descriptor of it after the block."""
    if monitor.version < _FILE_URIS:
        await monitor.getfd(_FD_NAME, file.fileno())
        yield f"fd:{_FD_NAME}"
        return
    fdset = await monitor.add_fd(file.fileno())
    try:
        yield f"file:/dev/fdset/{fdset}"
    finally:
        with suppress(ShimError):
            await monitor.remove_fd(fdset)


async def _await_completion(monitor: Monitor, doing: str) -> None:
    while (progress := await monitor.migration()).status not in _ENDS:  # noqa: ASYNC110 - its event needs a capability
        await asyncio.sleep(_PAUSE_S)
    if progress.status != "completed":
        raise QmpError(f"{doing}: {progress.error or progress.status}")
