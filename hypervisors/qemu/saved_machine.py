"""A whole machine in two files: its memory, with holes where the guest has used none, and the state of its devices.

It is QEMU's migration, with files for the other host. `x-ignore-shared` leaves the memory out of the stream: it is the
file behind `-object memory-backend-file`. Each VM gets it as a descriptor, of which nothing stays behind: the saved
file itself, mapped privately, where QEMU can do that with a file it may only read and no other program maps the VM's
memory; else a copy of its own. Source: QEMU's docs/devel/migration and docs/system/vm-templating.
"""

import asyncio
import os
import stat

from hypervisors.qemu.qmp import Monitor, QmpError
from pyshim.concurrency.threads import thread_to_the_end
from pyshim.host.fds import OwnedFd
from pyshim.host.sparse import copy_sparse, copy_without_zeros
from pyshim.model.units import MIB
from pyshim.model.vm import MemoryBacking, VmConfig

MEMORY, STATE = "memory", "state"
_PAUSE_S = 0.005
"""Seconds between two queries: QEMU sends an event only if a capability for it is set."""
_FILE_URIS = (8, 2)
"""From this version on QEMU takes files by name; older ones take any descriptor. Source: QEMU's qapi/migration.json."""
_READ_ONLY_MEMORY = (8, 2)
"""From this version on QEMU makes RAM from a file that it may only read (`rom=off`). An older one would have to be
trusted with a file that other VMs continue from. Source: QEMU's qapi/qom.json."""
_FD_NAME = "saved-machine"
_ENDS = ("completed", "failed", "cancelled")


def empty_memory(config: VmConfig) -> OwnedFd:
    """The memory of one VM, without a name and empty. Raises OSError."""
    memory = OwnedFd(os.memfd_create("guest-memory", os.MFD_CLOEXEC))
    try:
        os.truncate(memory.fileno(), config.memory.boot_mib * MIB)
    except BaseException:
        memory.close()
        raise
    return memory


def saved_memory(config: VmConfig) -> OwnedFd | None:
    """The memory of the saved machine itself, for reading; None if the VM cannot map it. Raises OSError.

    Memory that other programs map has to be a copy, and one that the guest gives back: QEMU would punch holes.
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
    """The empty memory has the content of the saved machine's. Raises OSError.

    QEMU may have mapped it: before the machine continues it looks at nothing in there.
    """
    with _open(f"{directory}/{MEMORY}", os.O_RDONLY) as saved:
        await thread_to_the_end(copy_sparse, saved, memory)


async def save_machine(monitor: Monitor, memory: OwnedFd, directory: str) -> None:
    """The two files are in `directory`; the paused VM cannot continue. Raises QmpError, OSError.

    QEMU's user may open the memory for reading, where that is enough for a VM: the directory lets only root in, so it
    is one that was given a descriptor.
    """
    with _open(f"{directory}/{STATE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as state:
        await monitor.leave_out_shared_memory()
        await monitor.migrate(await _migration_uri(monitor, state))
        await _await_completion(monitor, "save machine")
    with _open(f"{directory}/{MEMORY}", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as saved:
        await thread_to_the_end(copy_without_zeros, memory, saved)
        if monitor.version >= _READ_ONLY_MEMORY:
            os.fchmod(saved.fileno(), 0o644)


async def continue_machine(monitor: Monitor, directory: str) -> None:
    """The VM, made with `-incoming defer` and a copy of the memory, is paused where the saved one was.

    Raises OSError, QmpError, or QmpGone: QEMU may end over a state that is not this machine's.
    """
    with _open(f"{directory}/{STATE}", os.O_RDONLY) as state:
        await monitor.leave_out_shared_memory()
        await monitor.migrate_incoming(await _migration_uri(monitor, state))
        await _await_completion(monitor, "continue machine")


def _open(path: str, flags: int) -> OwnedFd:
    return OwnedFd(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


async def _migration_uri(monitor: Monitor, file: OwnedFd) -> str:
    if monitor.version >= _FILE_URIS:
        return f"file:/dev/fdset/{await monitor.add_fd(file.fileno())}"
    await monitor.getfd(_FD_NAME, file.fileno())
    return f"fd:{_FD_NAME}"


async def _await_completion(monitor: Monitor, doing: str) -> None:
    while (progress := await monitor.migration()).status not in _ENDS:  # noqa: ASYNC110 - its event needs a capability
        await asyncio.sleep(_PAUSE_S)
    if progress.status != "completed":
        raise QmpError(f"{doing}: {progress.error or progress.status}")
