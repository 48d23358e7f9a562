"""Storages changed after creation, volumes, and copied files."""

from __future__ import annotations

import asyncio
import logging
import os

from protos.agent import agent_pb2 as pb

from guest.agent import mounts
from guest.agent.children import Children
from guest.agent.errors import InvalidArgument, NotFound, os_cause
from guest.agent.files import names_in
from guest.agent.storage.copies import SHARED, copy_file
from guest.agent.storage.devices import disk_bytes, disk_of, rescan
from guest.agent.storage.hotplug import Hotplug

log = logging.getLogger(__name__)

_RESIZE_TIMEOUT_S = 60.0


class VolumeCalls:
    def __init__(self, *, hotplug: Hotplug, children: Children, left: set[str]) -> None:
        """`left` are paths of the share that were mounted and are not any more."""
        self._hotplug = hotplug
        self._children = children
        self._left = left

    async def update_ephemeral_mounts(self, request: pb.UpdateEphemeralMountsRequest) -> None:
        """Each tmpfs has the given options, such as another size. InvalidArgument for other drivers."""
        for storage in request.storages:
            target = storage.mount_point
            if storage.driver != "ephemeral":
                raise InvalidArgument(f"update mount {target!r}: driver {storage.driver!r} is not 'ephemeral'")
            options = [word for word in storage.options if not word.startswith("fsgid=")]
            if not options:
                continue
            os.makedirs(target, exist_ok=True)
            if mounts.mounted_type(os.path.normpath(target)) == storage.fstype and "remount" not in options:
                options.append("remount")
            mounts.mount(storage.source or "tmpfs", target, storage.fstype or "tmpfs", options)

    async def copy_file(self, request: pb.CopyFileRequest) -> None:
        copy_file(request)

    async def remove_stale_shares(self, request: pb.RemoveStaleVirtiofsShareMountsRequest) -> None:
        """Of the share's file systems, those are unmounted whose mount points the host has removed."""
        for point, found in sorted(mounts.mounted().items(), reverse=True):
            if found.fstype == "virtiofs" and point.startswith(f"{SHARED}/") and _is_gone(point):
                mounts.unmount(point)
                self._left.add(point)
                log.info("share unmounted", extra={"path": point})
        # A look that finds nothing makes the kernel forget the mount point, of which virtiofsd has a descriptor. One
        # that the kernel has seen within virtiofsd's cache time is still found, and forgotten at a later call.
        for path in tuple(self._left):
            if not await asyncio.to_thread(os.path.exists, path):
                self._left.discard(path)

    async def stats(self, request: pb.VolumeStatsRequest) -> pb.VolumeStatsResponse:
        """Bytes and inodes of the file system at the path."""
        path = request.volume_guest_path
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise NotFound(f"stat volume {path!r}: {os_cause(error)}") from error
        total, available, used = found.f_blocks, found.f_bavail, found.f_blocks - found.f_bfree
        block = found.f_frsize
        usage = pb.VolumeUsage(
            total=total * block, available=available * block, used=used * block, unit=pb.VolumeUsage.BYTES
        )
        inodes = pb.VolumeUsage(
            total=found.f_files, available=found.f_ffree, used=found.f_files - found.f_ffree, unit=pb.VolumeUsage.INODES
        )
        condition = pb.VolumeCondition(abnormal=False, message="OK")
        return pb.VolumeStatsResponse(usage=[usage, inodes], volume_condition=condition)

    async def resize(self, request: pb.ResizeVolumeRequest) -> None:
        """The mounted ext2/3/4 file system at the path has `size` bytes (0: its whole device). The host has grown the
        device.
        """
        path = os.path.normpath(request.volume_guest_path)
        found = mounts.mounted().get(path)
        if found is None:
            raise NotFound(f"volume {path!r}: nothing is mounted there")
        if found.fstype not in ("ext2", "ext3", "ext4"):
            raise InvalidArgument(f"resize volume {path!r}: {found.fstype} file systems cannot be resized here")
        await self._wait_until_grown(found.source, request.size)
        words = ("-f", found.source, *([f"{request.size // 1024}K"] if request.size else []))
        await self._children.call("resize2fs", *words, doing=f"resize volume {path!r}", timeout_s=_RESIZE_TIMEOUT_S)

    async def _wait_until_grown(self, device: str, size: int) -> None:
        """The kernel sees a disk of `size` bytes or more. The host's announcement may arrive late."""
        folder = disk_of(device)

        def look() -> str | None:
            rescan(folder)
            return device if disk_bytes(folder) >= size else None

        await self._hotplug.wait_for(f"disk {device!r} of {size} bytes", look)


def _is_gone(point: str) -> bool:
    """True if its directory lists it no more. A look at the point itself might be answered by the kernel's cache."""
    folder, name = os.path.split(point)
    return name not in names_in(folder)
