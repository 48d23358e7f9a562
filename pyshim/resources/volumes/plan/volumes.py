"""What each mount of a spec becomes: shared by virtio-fs, made in the guest, or a disk. Pure.

The order of the questions is Kata's: an emptyDir in memory, huge pages, the pod's /dev/shm, a direct volume, a block
device, the guest's own trees; whatever is left is a host directory or file and is shared.
"""

from collections.abc import Mapping

import msgspec

from pyshim.model.config import Config
from pyshim.model.copies import VolumeCopy
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, GuestPath, HostPath
from pyshim.model.mounts import HostMount, SourceKind, TargetKind
from pyshim.model.oci import OciMount, OciSpec
from pyshim.model.plans import DiskUse, MemoryVolume, SharePlan
from pyshim.model.units import GIB, KIB, MIB
from pyshim.model.volumes import SourceFacts
from pyshim.resources.volumes.plan.disk_volumes import (
    DISK_TYPES,
    direct_disk,
    disk_storage,
    empty_dir_disk,
    file_system_disk,
    group_option,
    in_guest,
    node_disk,
    short_name,
)
from pyshim.resources.volumes.plan.disks import digest
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR, GUEST_SHARED_DIR, WATCHABLE_DIR

_GUEST_OWN_TREES = ("/proc", "/sys", "/dev")
_WATCHED_PLUGINS = tuple(f"/kubernetes.io~{plugin}/" for plugin in ("configmap", "secret", "projected", "downward-api"))
"""Volumes the kubelet rewrites while they are in use; Kata has the guest follow them by copying."""
_FROM_HOST = ("private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable")


class VolumesPlan(msgspec.Struct, frozen=True, kw_only=True):
    mounts: tuple[OciMount, ...]
    """As the guest makes them."""
    host_mounts: tuple[HostMount, ...]
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
) -> VolumesPlan:
    """The plan for every mount of `spec`; `sources` has the facts of every path in `volume_sources(spec)`.

    Raises InvalidArgument, FailedPrecondition or Unimplemented naming the mount.
    """
    volumes = _Volumes(container_id, spec, config, share)
    mounts = tuple(volumes.add(mount, sources) for mount in spec.mounts if not _is_cgroup(mount))
    return VolumesPlan(
        mounts=mounts,
        host_mounts=tuple(volumes.host_mounts),
        storages=tuple(volumes.storages),
        memory_volumes=tuple(volumes.memory_volumes),
        disks=tuple(volumes.disks),
        copies=tuple(dict.fromkeys(volumes.copies)),
    )


def volume_sources(spec: OciSpec) -> tuple[str, ...]:
    """Host paths whose facts the plan needs, those of block devices by number."""
    mounts = (mount.source for mount in spec.mounts if _has_host_source(mount))
    devices = (f"/dev/block/{device.major}:{device.minor}" for device in spec.devices if device.type == "b")
    return tuple(dict.fromkeys((*mounts, *devices)))


def _has_host_source(mount: OciMount) -> bool:
    return mount.source.startswith("/") and (mount.is_bind or mount.type in DISK_TYPES)


class _Volumes:
    """Collects what each mount of the spec needs on the host and in the guest."""

    def __init__(self, container_id: ContainerId, spec: OciSpec, config: Config, share: SharePlan) -> None:
        self._container_id = container_id
        self._spec = spec
        self._config = config
        self._share = share
        self.host_mounts: list[HostMount] = []
        self.storages: list[Storage] = []
        self.memory_volumes: list[MemoryVolume] = []
        self.disks: list[DiskUse] = []
        self.copies: list[VolumeCopy] = []

    def add(self, mount: OciMount, sources: Mapping[str, SourceFacts]) -> OciMount:
        """The mount as the guest makes it; whatever must be done first is collected."""
        if not mount.is_bind:
            return self._not_bind(mount, sources)
        if not mount.source.startswith("/"):
            raise InvalidArgument(f"mount volume on '{mount.destination}': source {mount.source!r} is not absolute")
        facts = sources[mount.source]
        if facts.direct is not None:
            return self._on_disk(mount, direct_disk(self._config, facts.direct, on=mount.destination))
        if facts.kind is SourceKind.MISSING:
            raise FailedPrecondition(f"mount volume '{mount.source}' on '{mount.destination}': ENOENT (no such file)")
        if facts.empty_dir is not None and facts.empty_dir.in_memory:
            return self._memory_empty_dir(mount, facts)
        if facts.fs_type == "hugetlbfs":
            return self._hugepages(mount, facts)
        if mount.destination == "/dev/shm":
            return _moved(mount, f"{GUEST_SANDBOX_DIR}/shm", ("rbind",))
        if facts.kind is SourceKind.BLOCK:
            return self._on_disk(mount, node_disk(self._config, facts, read_only=mount.is_read_only))
        if facts.kind is not SourceKind.FILE and _is_guest_own(mount.source):
            return mount
        if facts.empty_dir is not None and facts.empty_dir.sub_path:
            return self._sub_path(mount, facts)
        if facts.empty_dir is not None and self._config.runtime.emptydir_mode != "shared-fs":
            return self._disk_empty_dir(mount, facts, facts.empty_dir.path)
        if facts.empty_dir is not None and not self._config.runtime.disable_guest_empty_dir:
            return self._guest_empty_dir(mount, facts)
        return self._shared(mount, facts)

    def _not_bind(self, mount: OciMount, sources: Mapping[str, SourceFacts]) -> OciMount:
        if mount.destination == "/dev/shm":
            return _moved(mount, f"{GUEST_SANDBOX_DIR}/shm", ("rbind",))
        if not _has_host_source(mount):
            return mount
        facts = sources[mount.source]
        if facts.kind is SourceKind.MISSING:
            raise FailedPrecondition(f"mount volume '{mount.source}' on '{mount.destination}': ENOENT (no such file)")
        if facts.kind not in (SourceKind.BLOCK, SourceKind.FILE):
            raise InvalidArgument(
                f"mount volume '{mount.source}' ({mount.type}) on '{mount.destination}': "
                "neither a block device nor a file"
            )
        options = tuple(word for word in mount.options if word != "loop")
        storage = disk_storage(mount.type, options, f"{GUEST_SANDBOX_DIR}/storage/{digest(mount.source)}")
        return self._on_disk(mount, file_system_disk(self._config, facts.device_path or mount.source, storage, facts))

    def _on_disk(self, mount: OciMount, use: DiskUse) -> OciMount:
        self.disks.append(use)
        assert use.storage is not None
        return _moved(mount, use.storage.mount_point, ("rbind", "ro") if mount.is_read_only else ("rbind",))

    def _memory_empty_dir(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        """A tmpfs of the guest's, as large as the one the kubelet made on the host, which stays empty."""
        assert facts.empty_dir is not None
        top = in_guest("ephemeral", facts.empty_dir.path)
        # The kubelet's tmpfs is 0777 whatever its size; a subPath's directory says nothing of the volume's own mode.
        mode = facts.mode & 0o7777 if not facts.empty_dir.sub_path else 0o777
        options = [f"mode={mode:o}", *group_option(facts)]
        if facts.size_bytes:
            options.insert(0, f"size={facts.size_bytes}")
        storage = Storage(
            driver="ephemeral",
            driver_options=(),
            source="tmpfs",
            fs_type="tmpfs",
            options=tuple(options),
            mount_point=top,
            shared=True,
        )
        self.storages.append(storage)
        self.memory_volumes.append(MemoryVolume(host_path=HostPath(facts.empty_dir.path), storage=storage))
        if not facts.empty_dir.sub_path:
            return _moved(mount, top, mount.options)
        return _moved(mount, self._made_in_guest(GuestPath(f"{top}/{facts.empty_dir.sub_path}"), facts), mount.options)

    def _guest_empty_dir(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        assert facts.empty_dir is not None
        return _moved(mount, self._made_in_guest(in_guest("local", facts.empty_dir.path), facts), mount.options)

    def _sub_path(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        """A directory of an emptyDir on the host's disk, which is shared, or refused where the volume has a disk.

        Such a subPath may be the very directory `disk.img` lies in: a guest that can write there could put a link in
        the file's place and have QEMU open another file of the host.
        """
        mode = self._config.runtime.emptydir_mode
        if mode != "shared-fs":
            raise Unimplemented(
                f"mount volume '{mount.source}' on '{mount.destination}': "
                f"a subPath of an emptyDir is not available with emptydir_mode {mode!r}"
            )
        return self._shared(mount, facts)

    def _disk_empty_dir(self, mount: OciMount, facts: SourceFacts, directory: str) -> OciMount:
        """The volume is a directory on its own disk: that has the kubelet's mode and group, and no `lost+found`."""
        volume, storage = empty_dir_disk(self._config, directory)
        self.disks.append(DiskUse(disk=volume, storage=storage, container_path="", make_bytes=facts.size_bytes))
        return _moved(mount, self._made_in_guest(GuestPath(f"{storage.mount_point}/volume"), facts), mount.options)

    def _made_in_guest(self, path: GuestPath, facts: SourceFacts) -> GuestPath:
        """A directory of the guest's that lives as long as the sandbox."""
        self.storages.append(
            Storage(
                driver="local",
                driver_options=(),
                source="local",
                fs_type="local",
                options=(f"mode={facts.mode & 0o7777:o}", *group_option(facts)),
                mount_point=path,
                shared=True,
            )
        )
        return path

    def _hugepages(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        """Huge pages of the guest's, as many bytes as the container may have of this page size."""
        size_bytes = _hugepage_limit(self._spec, facts.page_bytes) or facts.size_bytes
        if not size_bytes:
            raise InvalidArgument(
                f"mount huge pages on '{mount.destination}': neither linux.resources.hugepageLimits nor the host's "
                f"'{mount.source}' says how many pages of {facts.page_bytes} bytes"
            )
        point = in_guest("ephemeral", facts.empty_dir.path if facts.empty_dir else mount.source)
        self.storages.append(
            Storage(
                driver="ephemeral",
                driver_options=(),
                source="nodev",
                fs_type="hugetlbfs",
                options=(f"pagesize={facts.page_bytes}", f"size={size_bytes}"),
                mount_point=point,
                shared=True,
            )
        )
        return _moved(mount, point, mount.options)

    def _shared(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        if self._share.virtiofsd is None:
            return self._copied(mount, facts)
        name = f"{self._container_id}-{digest(mount.destination)}-{short_name(mount.source)}"
        propagation = _propagation(mount)
        self.host_mounts.append(
            HostMount(
                type="bind",
                source=mount.source,
                target=HostPath(f"{self._share.mounts_dir}/{name}"),
                target_kind=TargetKind.LIKE_SOURCE,
                options=("rbind", *_read_only(mount), propagation),
                propagation=None,
                beneath=self._share.mounts_dir,
                for_guest_only=propagation == "rprivate" and facts.has_mounts_below,
            )
        )
        shown, options = f"{GUEST_SHARED_DIR}/{name}", mount.options
        if facts.kind is SourceKind.DIRECTORY and mount.is_read_only:
            if _is_watched(mount.source):
                shown = self._watched(name, shown)
            elif not mount.is_read_only_recursive and (facts.has_mounts_below or propagation == "rslave"):
                # The guest sees one mount where the host has several: there, `ro` would be of all of them. On the host
                # it is of the topmost only, and the host refuses to write to that.
                options = tuple(word for word in options if word != "ro")
        return _moved(mount, shown, options)

    def _watched(self, name: str, source: str) -> GuestPath:
        """Where the guest has a copy of the directory that follows it."""
        point = GuestPath(f"{GUEST_SHARED_DIR}/{WATCHABLE_DIR}/{name}")
        self.storages.append(
            Storage(
                driver="watchable-bind",
                driver_options=(),
                source=source,
                fs_type="bind",
                options=("rbind", "ro"),
                mount_point=point,
            )
        )
        return point

    def _copied(self, mount: OciMount, facts: SourceFacts) -> OciMount:
        """A copy in the guest, one for all containers of the pod that have it. Devices and sockets have none."""
        if facts.kind not in (SourceKind.DIRECTORY, SourceKind.FILE):
            raise FailedPrecondition(
                f"mount volume '{mount.source}' on '{mount.destination}': "
                'shared_fs = "none" copies directories and files only'
            )
        path = GuestPath(f"{GUEST_SHARED_DIR}/copy-{digest(mount.source)}-{short_name(mount.source)}")
        follows = facts.kind is SourceKind.DIRECTORY and _is_watched(mount.source)
        self.copies.append(VolumeCopy(source=mount.source, guest_path=path, follows=follows))
        return _moved(mount, path, mount.options)


def _propagation(mount: OciMount) -> str:
    """How later mounts on the host reach the share: never, or from the host inwards.

    A guest's mounts stay in the guest, so `shared` is `slave`. It is never left as the source has it: an unmount of the
    share would then unmount the same directory of the host.
    """
    words = [word for word in mount.options if word in _FROM_HOST]
    return "rslave" if words and words[-1].lstrip("r") in ("slave", "shared") else "rprivate"


def _read_only(mount: OciMount) -> tuple[str, ...]:
    if mount.is_read_only_recursive:
        return ("rro",)
    return ("ro",) if mount.is_read_only else ()


def _moved(mount: OciMount, source: str, options: tuple[str, ...]) -> OciMount:
    """The mount of `source`, one mount in the guest: there recursive read-only is read-only."""
    words = tuple("ro" if word == "rro" else word for word in options)
    return OciMount(destination=mount.destination, type="bind", source=GuestPath(source), options=words)


def _hugepage_limit(spec: OciSpec, page_bytes: int) -> int:
    """Bytes the container may have in pages of this size; 0 when its resources do not say."""
    resources = (spec.raw.get("linux") or {}).get("resources") or {}
    limits = resources.get("hugepageLimits") or []
    units = {"KB": KIB, "MB": MIB, "GB": GIB}
    for limit in limits if isinstance(limits, list) else []:
        size = limit.get("pageSize", "") if isinstance(limit, dict) else ""
        if isinstance(size, str) and size[:-2].isdecimal() and size[-2:] in units:
            amount = limit.get("limit", 0)
            if int(size[:-2]) * units[size[-2:]] == page_bytes and isinstance(amount, int):
                return amount
    return 0


def _is_watched(source: str) -> bool:
    return any(plugin in source for plugin in _WATCHED_PLUGINS)


def _is_guest_own(source: str) -> bool:
    """Kernel trees are the guest's own: sharing the host's /proc, /sys or /dev would mean the wrong machine."""
    return any(source == tree or source.startswith(f"{tree}/") for tree in _GUEST_OWN_TREES)


def _is_cgroup(mount: OciMount) -> bool:
    return mount.type == "bind" and mount.source.startswith("/sys/fs/cgroup")
