"""The binds, disks and copied volumes of a sandbox. Each disk is plugged once for all containers that use it, and
unplugged with the last of them.

If a host device were plugged twice, the guest would see two disks and mount one file system twice, independently.
"""

import logging
from typing import NamedTuple

from pyshim.concurrency.tasks import to_the_end
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from pyshim.model.guest import GuestContainer
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.plans import ContainerPlan
from pyshim.model.seams import Agent
from pyshim.model.vm import BlockDevice, GuestLocation
from pyshim.model.volumes import DirectVolume, VolumeStats
from pyshim.resources.devices.vm_devices import PluggedDevices
from pyshim.resources.services import VmServices
from pyshim.resources.volumes.binds import Binds
from pyshim.resources.volumes.copying import VolumeCopies
from pyshim.resources.volumes.plan.disk_volumes import direct_volume_point
from pyshim.resources.volumes.plan.disks import with_disks

log = logging.getLogger(__name__)

_SANDBOX = ""
"""The user of disks that stay until the sandbox ends; no container has this id."""


class _Attached(NamedTuple):
    disk: BlockDevice
    location: GuestLocation
    direct: DirectVolume | None


class Attachments:
    def __init__(self, services: VmServices) -> None:
        self._services = services
        self._vm_devices = services.vm_devices
        self.binds = Binds(host=services.host, ledger=services.ledger)
        self.copies = VolumeCopies(host=services.host, tasks=services.tasks)
        self._attached: dict[str, _Attached] = {}
        self._plugged = PluggedDevices(self._vm_devices, services.tasks, forget=self._attached.__delitem__)

    async def attach(self, plan: ContainerPlan, undo: Undo) -> GuestContainer:
        """The container's volumes are in the share and its disks in the VM; the guest's part of the plan, with their
        places in it. Copies follow later, once the VM has grown.

        `undo` detaches what was attached or begun. Raises ShimError naming the volume.
        """
        await self.binds.attach(plan.binds, plan.container_id, undo)
        undo.push(self.detach, plan.container_id)
        plugged = []
        for use in plan.disks:
            if use.make_bytes:
                location = await self.attach_made_disk(use.disk, use.make_bytes)
            else:
                location = await self.attach_disk(use.disk, plan.container_id, use.direct)
            plugged.append((use, location))
        return with_disks(plan.guest, plugged)

    async def attach_disk(self, disk: BlockDevice, user: str, direct: DirectVolume | None = None) -> GuestLocation:
        """The disk is in the VM, for `user` among others; with `direct` it is that volume's.

        Raises FailedPrecondition for a read-only disk that is wanted for writing, what `plug` raises, and what `unplug`
        raises for a disk that is being unplugged.
        """
        async with self._plugged.locked(disk.id):
            attached = self._attached.get(disk.id)
            if attached is None:
                self._check_hotplug(disk)
                if direct is not None:
                    await self._mark(direct)
                attached = await to_the_end(self._plug(disk, user, direct))
            if attached.disk.read_only and not disk.read_only:
                raise FailedPrecondition(
                    f"attach '{disk.path}' for writing: another container of the pod has it read-only"
                )
            self._plugged.add(disk.id, user)
            return attached.location

    async def attach_made_disk(self, disk: BlockDevice, size_bytes: int, head: bytes = b"") -> GuestLocation:
        """The disk is in the VM until the sandbox ends, on a file made for it, which goes with the sandbox.

        `head` is what the new file begins with.
        """
        async with self._plugged.locked(disk.id):
            attached = self._attached.get(disk.id)
            if attached is None:
                self._check_hotplug(disk)
                detail = {"sandbox": self._services.plan.sandbox_id}
                self._services.hold(LedgerEntry(kind=ResourceKind.FILE, key=disk.path, detail=detail))
                await self._services.host.make_disk_file(disk.path, size_bytes, head)
                attached = await to_the_end(self._plug(disk, _SANDBOX))
            self._plugged.add(disk.id, _SANDBOX)
            return attached.location

    async def _plug(self, disk: BlockDevice, user: str, direct: DirectVolume | None = None) -> _Attached:
        """The disk is in the VM, recorded for `user` at once, so that the undo of a cancelled Create unplugs it."""
        attached = self._attached[disk.id] = _Attached(disk, await self._vm_devices.plug(disk), direct)
        self._plugged.add(disk.id, user)
        where = attached.location.scsi_address or attached.location.pci_path
        log.info("disk attached", extra={"device": disk.id, "path": disk.path, "at": where})
        return attached

    def _check_hotplug(self, disk: BlockDevice) -> None:
        if not self._vm_devices.capabilities().block_hotplug:
            raise Unimplemented(f"plug '{disk.path}': this vm takes no devices while it runs")

    async def _mark(self, volume: DirectVolume) -> None:
        """An empty file beside the record is named after the sandbox; `direct-volume stats` finds the sandbox by it."""
        mark = f"{volume.record_dir}/{self._services.plan.sandbox_id}"
        self._services.hold(LedgerEntry(kind=ResourceKind.FILE, key=mark))
        await self._services.host.write_bytes(mark, b"", 0o600)

    async def detach(self, user: str) -> None:
        """`user` has no disks any more. A disk without users is unplugged."""
        await self._plugged.detach(user)

    def all(self) -> tuple[tuple[BlockDevice, GuestLocation, int], ...]:
        """Every disk in the VM, its place there, and how many use it."""
        return tuple((one.disk, one.location, len(self._plugged.users(one.disk.id))) for one in self._attached.values())

    def writers(self) -> frozenset[str]:
        """The containers that have a disk they can write to."""
        writable = (each.disk.id for each in self._attached.values() if not each.disk.read_only)
        return frozenset().union(*map(self._plugged.users, writable)) - {_SANDBOX}

    async def volume_stats(self, volume_path: str, agent: Agent) -> VolumeStats:
        """The statistics of a direct volume. Raises NotFound if no container of the sandbox has it."""
        _, volume = self._direct_disk(volume_path)
        return await agent.volume_stats(direct_volume_point(volume))

    async def resize_volume(self, volume_path: str, size_bytes: int, agent: Agent) -> None:
        """The file system of a direct volume has grown to `size_bytes`, which the host's disk must have already."""
        disk, volume = self._direct_disk(volume_path)
        if size_bytes <= 0:
            raise InvalidArgument(f"resize direct volume '{volume_path}': {size_bytes} bytes is not a size")
        has_bytes = await self._services.host.disk_bytes(disk.path)
        if has_bytes < size_bytes:
            raise FailedPrecondition(
                f"resize direct volume '{volume_path}' to {size_bytes} bytes: '{disk.path}' has {has_bytes}"
            )
        async with self._plugged.locked(disk.id):
            if disk.id not in self._attached:
                raise NotFound(f"resize disk '{disk.id}': the sandbox has no such disk")
            await self._vm_devices.resize_disk(disk.id, has_bytes)
        await agent.resize_volume(direct_volume_point(volume), size_bytes)

    def _direct_disk(self, volume_path: str) -> tuple[BlockDevice, DirectVolume]:
        for attached in self._attached.values():
            if attached.direct is not None and attached.direct.volume_path == volume_path:
                return attached.disk, attached.direct
        raise NotFound(f"find direct volume '{volume_path}': no container of the sandbox has it")
