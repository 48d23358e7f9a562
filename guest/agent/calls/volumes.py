"""Storages changed after creation, volumes, and copied files."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import Internal, InvalidArgument, NotFound, os_cause
from guest.agent.runtime.children import find_program
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_BYTES, _INODES = 1, 2
_RESIZE_TIMEOUT_S = 60.0
_SHARED = "/run/kata-containers/shared/containers"


async def update_ephemeral_mounts(agent: Agent, request: Message) -> None:
    """Each tmpfs has the options now given, for example another size. InvalidArgument for other drivers."""
    from guest.agent.storage import mounts

    for storage in request.storages:
        if storage.driver != "ephemeral":
            raise InvalidArgument(f"update mount {storage.mount_point!r}: driver {storage.driver!r} is not 'ephemeral'")
        options = [word for word in storage.options if not word.startswith("fsgid=")]
        if not options:
            continue
        os.makedirs(storage.mount_point, exist_ok=True)
        if (
            mounts.mount_types().get(os.path.normpath(storage.mount_point)) == storage.fstype
            and "remount" not in options
        ):
            options.append("remount")
        mounts.mount(storage.source or "tmpfs", storage.mount_point, storage.fstype or "tmpfs", options)


async def remove_stale_share_mounts(agent: Agent, request: Message) -> None:
    """Every mount below the share was looked at, which makes virtiofsd drop those that are gone on the host."""
    from guest.agent.storage import mounts

    for path in mounts.mount_types():
        if path == _SHARED or path.startswith(_SHARED + "/"):
            try:
                os.stat(path)
            except OSError as error:
                log.info("stale share mount", path=path, error=error)


async def copy_file(agent: Agent, request: Message) -> None:
    from guest.agent.storage.files import copy_file as copy

    copy(request)


async def stats(agent: Agent, request: Message) -> Message:
    """Bytes and inodes of the file system at the path."""
    path = request.volume_guest_path
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise NotFound(f"stat volume {path!r}: {os_cause(error)}") from error
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    usage = Message("VolumeUsage", total=total, available=free, used=used, unit=_BYTES)
    inodes = Message(
        "VolumeUsage", total=found.f_files, available=found.f_ffree, used=found.f_files - found.f_ffree, unit=_INODES
    )
    condition = Message("VolumeCondition", abnormal=False, message="OK")
    return Message("VolumeStatsResponse", usage=[usage, inodes], volume_condition=condition)


async def resize(agent: Agent, request: Message) -> None:
    """The mounted ext2/3/4 file system at the path has grown to `size` bytes (0: its whole device), which the host has
    grown before.
    """
    path = os.path.normpath(request.volume_guest_path)
    device, fstype = _mounted_device(path)
    if fstype not in ("ext2", "ext3", "ext4"):
        raise InvalidArgument(f"resize volume {path!r}: {fstype} file systems cannot be resized here")
    program = find_program("resize2fs")
    if program is None:
        raise Internal(f"resize volume {path!r}: the guest has no resize2fs")
    await _has_grown(agent, device, request.size)
    size = [f"{request.size // 1024}K"] if request.size else []
    ended = await agent.children.run([program, "-f", device, *size], timeout_s=_RESIZE_TIMEOUT_S)
    if ended.code != 0:
        raise Internal(f"resize volume {path!r}: {ended.stderr.decode('utf-8', 'replace').strip()}")


async def _has_grown(agent: Agent, device: str, size: int) -> None:
    """The kernel knows the disk to be `size` bytes or more. The host's news of it may still be under way."""
    from guest.agent.storage.block import disk_bytes, disk_of, rescan
    from guest.agent.storage.uevent import wait_for

    folder = disk_of(device)

    def look() -> str | None:
        rescan(folder)
        return device if disk_bytes(folder) >= size else None

    await wait_for(agent, f"disk {device!r} of {size} bytes", look)


def _mounted_device(path: str) -> tuple[str, str]:
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        found = [line.split(" ") for line in file]
    for fields in reversed(found):
        if fields[1] == path.replace(" ", "\\040"):
            return fields[0], fields[2]
    raise NotFound(f"volume {path!r}: nothing is mounted there")
