"""Chooses the kind of each mount of a spec: made in the guest, a disk, or shared with the host. Pure.

The order of the questions is Kata's: a direct volume, an emptyDir in memory, huge pages, the pod's /dev/shm, a block
device, the guest's own trees; any other mount is a host directory or file and is shared. A kind per module:
`guest_volumes.py`, `disk_volumes.py`, `shared_volumes.py`.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId
from pyshim.model.oci import OciMount, OciSpec
from pyshim.model.plans import DiskUse, MemoryVolume, SharePlan
from pyshim.model.volumes import Bind, EmptyDir, SourceFacts, SourceKind, VolumeCopy
from pyshim.resources.volumes.plan.disk_volumes import DISK_TYPES, direct_volume, disk_empty_dir, file_system, raw_block
from pyshim.resources.volumes.plan.guest_volumes import guest_empty_dir, huge_pages, memory_empty_dir, shared_memory
from pyshim.resources.volumes.plan.shared_volumes import by_one_bind, shared
from pyshim.resources.volumes.plan.volume import Volume

_GUEST_OWN_TREES = ("/proc", "/sys", "/dev")


class VolumesPlan(msgspec.Struct, frozen=True, kw_only=True):
    mounts: tuple[OciMount, ...]
    """As the guest makes them."""
    binds: tuple[Bind, ...]
    """Each once."""
    storages: tuple[Storage, ...]
    memory_volumes: tuple[MemoryVolume, ...]
    disks: tuple[DiskUse, ...]
    copies: tuple[VolumeCopy, ...]


def volumes_plan(
    *,
    container_id: ContainerId,
    spec: OciSpec,
    config: Config,
    share: SharePlan,
    sources: Mapping[str, SourceFacts],
    bound: Sequence[Bind] = (),
) -> VolumesPlan:
    """The plan for every mount of `spec`.

    `sources` has the facts of every path in `volume_sources(spec)`, and of every emptyDir of which one is a subPath;
    `bound` are the binds that other containers of the sandbox have now.

    Raises InvalidArgument, FailedPrecondition or Unimplemented naming the mount.
    """
    chooser = _Chooser(container_id, spec, config, share, sources)
    volumes = by_one_bind([chooser.volume(mount) for mount in spec.mounts if not _is_cgroup(mount)], bound)
    return VolumesPlan(
        mounts=tuple(each.mount for each in volumes),
        binds=tuple(dict.fromkeys(item for each in volumes for item in each.binds)),
        storages=tuple(dict.fromkeys(item for each in volumes for item in each.storages)),
        memory_volumes=tuple(item for each in volumes for item in each.memory_volumes),
        disks=tuple(item for each in volumes for item in each.disks),
        copies=tuple(dict.fromkeys(item for each in volumes for item in each.copies)),
    )


def vhost_user_store(hypervisor: HypervisorConfig) -> str:
    """The store whose devices are disks that other programs serve; empty without one."""
    return hypervisor.vhost_user_store_path if hypervisor.enable_vhost_user_store else ""


def volume_sources(spec: OciSpec) -> tuple[str, ...]:
    """Host paths whose facts the plan needs, those of block devices by number."""
    mounts = (mount.source for mount in spec.mounts if _has_host_source(mount))
    devices = (f"/dev/block/{device.major}:{device.minor}" for device in spec.devices if device.type == "b")
    return tuple(dict.fromkeys((*mounts, *devices)))


def _has_host_source(mount: OciMount) -> bool:
    return mount.source.startswith("/") and (mount.is_bind or mount.type in DISK_TYPES)


class _Chooser(msgspec.Struct, frozen=True):
    container_id: ContainerId
    spec: OciSpec
    config: Config
    share: SharePlan
    sources: Mapping[str, SourceFacts]

    def volume(self, mount: OciMount) -> Volume:
        if not mount.is_bind and mount.destination == "/dev/shm":
            return shared_memory(mount)
        if not mount.is_bind and not _has_host_source(mount):
            return Volume(mount=mount)
        if not mount.source.startswith("/"):
            raise InvalidArgument(f"mount volume on '{mount.destination}': source {mount.source!r} is not absolute")
        facts = self.sources[mount.source]
        if mount.is_bind and facts.direct is not None:
            # The peer pod's service finds its own cloud volume by the kubelet's path, and attaches it to its VM.
            return Volume(mount=mount) if self.config.is_remote else direct_volume(mount, facts.direct, self.config)
        if facts.kind is SourceKind.MISSING:
            raise FailedPrecondition(f"mount volume '{mount.source}' on '{mount.destination}': ENOENT (no such file)")
        return self._bind(mount, facts) if mount.is_bind else file_system(mount, facts, self.config)

    def _bind(self, mount: OciMount, facts: SourceFacts) -> Volume:
        if facts.empty_dir is not None and facts.empty_dir.in_memory:
            return memory_empty_dir(mount, facts, facts.empty_dir)
        if facts.fs_type == "hugetlbfs":
            return huge_pages(mount, facts, self.spec)
        if mount.destination == "/dev/shm":
            return shared_memory(mount)
        if facts.kind is SourceKind.BLOCK:
            return raw_block(mount, facts, self.config)
        if facts.kind is not SourceKind.FILE and _is_guest_own(mount.source):
            return Volume(mount=mount)
        if facts.empty_dir is not None:
            return self._empty_dir(mount, facts, facts.empty_dir)
        return shared(mount, facts, self.container_id, self.share)

    def _empty_dir(self, mount: OciMount, facts: SourceFacts, empty_dir: EmptyDir) -> Volume:
        """An emptyDir on the node's disk.

        A subPath of one with a disk is refused. It may be the very directory `disk.img` lies in: a guest that can write
        there could put a link in the file's place and have QEMU open another file of the host.
        """
        mode = self.config.runtime.emptydir_mode
        if empty_dir.sub_path and mode != "shared-fs":
            raise Unimplemented(
                f"mount volume '{mount.source}' on '{mount.destination}': "
                f"a subPath of an emptyDir is not available with emptydir_mode {mode!r}"
            )
        if mode != "shared-fs":
            return disk_empty_dir(mount, facts, empty_dir.path, self.config)
        if empty_dir.sub_path or self.config.runtime.disable_guest_empty_dir:
            return shared(mount, facts, self.container_id, self.share, self.sources.get(empty_dir.path))
        return guest_empty_dir(mount, facts, empty_dir)


def _is_guest_own(source: str) -> bool:
    """Kernel trees are the guest's own: sharing the host's /proc, /sys or /dev would mean the wrong machine."""
    return any(source == tree or source.startswith(f"{tree}/") for tree in _GUEST_OWN_TREES)


def _is_cgroup(mount: OciMount) -> bool:
    return mount.type == "bind" and mount.source.startswith("/sys/fs/cgroup")
