"""Answers CSI drivers about a sandbox's direct volumes: the guest that has them mounted is asked."""

from collections.abc import Callable

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.seams import Agent, Host
from pyshim.model.volumes import VolumeStats
from pyshim.resources.volumes.attachments import Attachments
from pyshim.resources.volumes.plan.disk_volumes import direct_volume_point


class DirectVolumes:
    def __init__(self, host: Host, *, agent: Callable[[], Agent], attachments: Attachments) -> None:
        self._host = host
        self._agent = agent
        self._attachments = attachments

    async def stats(self, volume_path: str) -> VolumeStats:
        """Raises NotFound for a volume the sandbox does not have."""
        _, volume = self._attachments.direct_disk(volume_path)
        return await self._agent().volume_stats(direct_volume_point(volume))

    async def resize(self, volume_path: str, size_bytes: int) -> None:
        """The file system has grown to `size_bytes`; the host's device or file must have that size already."""
        disk, volume = self._attachments.direct_disk(volume_path)
        if size_bytes <= 0:
            raise InvalidArgument(f"resize direct volume '{volume_path}': {size_bytes} bytes is not a size")
        has_bytes = await self._host.disk_bytes(disk.path)
        if has_bytes < size_bytes:
            raise FailedPrecondition(
                f"resize direct volume '{volume_path}' to {size_bytes} bytes: '{disk.path}' has {has_bytes}"
            )
        await self._attachments.resize(disk.id, has_bytes)
        await self._agent().resize_volume(direct_volume_point(volume), size_bytes)
