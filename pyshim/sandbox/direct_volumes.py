"""Direct volumes of a sandbox: the mark at each one's record, and the monitor socket where CSI drivers ask about them.

Statistics and growth are answered by the guest that has them mounted. The socket opens with the first such volume: no
other pod pays for it.
"""

from collections.abc import Awaitable, Callable

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.volumes import DirectVolume, VolumeStats
from pyshim.plan.disk_volumes import direct_volume_point
from pyshim.sandbox.attachments import Attachments
from pyshim.sandbox.seams import Agent, Host, Monitor, VolumeRpc

STATE_ROOT = "/run/vc/sbs"
OpenMonitor = Callable[[str, VolumeRpc], Awaitable[Monitor]]


class DirectVolumes:
    """Serves the sandbox's monitor socket (`seams.VolumeRpc`)."""

    def __init__(
        self,
        *,
        sandbox_id: str,
        host: Host,
        agent: Callable[[], Agent],
        attachments: Callable[[], Attachments],
        open_monitor: OpenMonitor,
        hold: Callable[[LedgerEntry], None],
        at_end: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        """`hold` takes an entry for as long as the sandbox lives, `at_end` a call for its end."""
        self._sandbox_id = sandbox_id
        self._host = host
        self._agent = agent
        self._attachments = attachments
        self._open_monitor = open_monitor
        self._hold = hold
        self._at_end = at_end
        self._monitor: Monitor | None = None

    async def announce(self, volume: DirectVolume) -> None:
        """The sandbox's id lies beside the record, which is how `direct-volume stats` finds whom to ask."""
        mark = f"{volume.record_dir}/{self._sandbox_id}"
        self._hold(LedgerEntry(kind=ResourceKind.SOCKET, key=mark))
        await self._host.write_bytes(mark, b"", 0o600)
        if self._monitor is None:
            path = f"{STATE_ROOT}/{self._sandbox_id}/shim-monitor.sock"
            self._hold(LedgerEntry(kind=ResourceKind.SOCKET, key=path))
            self._monitor = await self._open_monitor(path, self)
            self._at_end(self._monitor.close)

    async def stats(self, volume_path: str) -> VolumeStats:
        """Raises NotFound for a volume the sandbox does not have."""
        _, volume = self._attachments().direct_disk(volume_path)
        return await self._agent().volume_stats(direct_volume_point(volume))

    async def resize(self, volume_path: str, size_bytes: int) -> None:
        """The file system has grown to `size_bytes`; the host's device or file must have that size already."""
        disk, volume = self._attachments().direct_disk(volume_path)
        if size_bytes <= 0:
            raise InvalidArgument(f"resize direct volume '{volume_path}': {size_bytes} bytes is no size")
        has_bytes = await self._host.disk_bytes(disk.path)
        if has_bytes < size_bytes:
            raise FailedPrecondition(
                f"resize direct volume '{volume_path}' to {size_bytes} bytes: '{disk.path}' has {has_bytes}"
            )
        await self._attachments().resize(disk.id, has_bytes)
        await self._agent().resize_volume(direct_volume_point(volume), size_bytes)
