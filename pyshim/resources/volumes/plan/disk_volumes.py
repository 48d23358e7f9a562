"""Volumes that are disks: the device to plug, and the guest's mount of it. Pure."""

import posixpath

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import GuestPath
from pyshim.model.plans import DiskUse
from pyshim.model.vm import BlockDevice
from pyshim.model.volumes import DirectVolume, FsGroup, SourceFacts
from pyshim.resources.volumes.plan.disks import digest, disk, served_disk
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR

DISK_TYPES = ("ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "squashfs", "erofs", "iso9660", "f2fs")
_DIRECT_BLOCK_TYPES = ("block", "directvol", "rawblock")
"""Volume types of a disk: that of Kata's Go runtime, of its Rust one, and an old spelling of the latter."""
_FS_GROUP_POLICIES = {"": False, "Always": False, "OnRootMismatch": True}


def direct_disk(config: Config, volume: DirectVolume, *, on: str) -> DiskUse:
    """The disk of a direct volume, for the mount on `on`. Raises Unimplemented or InvalidArgument naming the record."""
    what = f"mount direct volume '{volume.volume_path}' on '{on}'"
    if volume.volume_type not in _DIRECT_BLOCK_TYPES:
        raise Unimplemented(
            f"{what}: volume-type {volume.volume_type!r} of '{volume.record_dir}' is not supported, "
            f"{', '.join(_DIRECT_BLOCK_TYPES)} are"
        )
    if not volume.device.startswith("/") or not volume.fs_type:
        raise InvalidArgument(f"{what}: '{volume.record_dir}' names no absolute device or no fstype")
    storage = disk_storage(
        volume.fs_type,
        volume.options,
        direct_volume_point(volume),
        fs_group=_fs_group(volume, what),
        driver_options=(CREATE_FILESYSTEM,) if volume.metadata.get("createFilesystem") == "true" else (),
    )
    return file_system_disk(config, volume.device, storage, None, direct=volume)


def file_system_disk(
    config: Config, device: str, storage: Storage, facts: SourceFacts | None, *, direct: DirectVolume | None = None
) -> DiskUse:
    """A device or image file with a file system, mounted in the guest as `storage` says."""
    read_only = "ro" in storage.options or (facts is not None and facts.is_read_only_device)
    discard = "discard" in storage.options
    volume = _volume(config, facts, device, read_only=read_only, discard=discard)
    return DiskUse(disk=volume, storage=storage, container_path="", direct=direct)


def node_disk(config: Config, facts: SourceFacts, *, read_only: bool) -> DiskUse:
    """A block device bound as a file: the guest binds its own node of the disk."""
    volume = block_volume(config, facts, read_only=read_only)
    storage = disk_storage("bind", ("bind",), f"{GUEST_SANDBOX_DIR}/storage/node-{digest(volume.path)}")
    return DiskUse(disk=volume, storage=storage, container_path="")


def block_volume(config: Config, facts: SourceFacts, *, read_only: bool) -> BlockDevice:
    """The disk over a block device, as it is for every container that has it."""
    return _volume(config, facts, facts.device_path, read_only=facts.is_read_only_device or read_only, discard=False)


def _volume(config: Config, facts: SourceFacts | None, path: str, *, read_only: bool, discard: bool) -> BlockDevice:
    if facts is not None and facts.vhost_user_socket:
        return served_disk(config, device_id=disk_id(facts.vhost_user_socket), socket=facts.vhost_user_socket)
    return disk(config, device_id=disk_id(path), path=path, read_only=read_only, discard=discard)


def disk_storage(
    fs_type: str,
    options: tuple[str, ...],
    mount_point: str,
    *,
    fs_group: FsGroup | None = None,
    driver_options: tuple[str, ...] = (),
    shared: bool = False,
) -> Storage:
    """A file system of a disk's; driver and source come with the place the disk is plugged at."""
    return Storage(
        driver="",
        driver_options=driver_options,
        source="",
        fs_type=fs_type,
        options=tuple(word for word in options if word not in ("loop", "rw")),
        mount_point=GuestPath(mount_point),
        fs_group=fs_group,
        shared=shared,
    )


def direct_volume_point(volume: DirectVolume) -> str:
    """Where the guest mounts it, the same for every container that has it."""
    return f"{GUEST_SANDBOX_DIR}/storage/{digest(volume.volume_path)}"


def disk_id(path: str) -> str:
    """The id of the disk over a host path: the same for all containers of the sandbox, so that it is plugged once."""
    return f"blk-{digest(path)}"


def _fs_group(volume: DirectVolume, what: str) -> FsGroup | None:
    group = volume.metadata.get("fsGroup", "")
    if not group:
        return None
    policy = volume.metadata.get("fsGroupChangePolicy", "")
    if not group.isdecimal() or int(group) >= 1 << 32 or policy not in _FS_GROUP_POLICIES:
        raise InvalidArgument(f"{what}: fsGroup {group!r} with fsGroupChangePolicy {policy!r} is not valid")
    return FsGroup(group_id=int(group), only_on_root_mismatch=_FS_GROUP_POLICIES[policy])


def in_guest(kind: str, path: str) -> GuestPath:
    return GuestPath(f"{GUEST_SANDBOX_DIR}/{kind}/{short_name(path)}-{digest(path)}")


def group_option(facts: SourceFacts) -> tuple[str, ...]:
    """The volume's fsGroup, which the kubelet gave the host's directory."""
    return (f"fsgid={facts.gid}",) if facts.gid else ()


def short_name(path: str) -> str:
    """A part of `path` that a reader recognises, short enough for a file name."""
    return posixpath.basename(path).encode()[:100].decode(errors="ignore") or "root"


CREATE_FILESYSTEM = "create_filesystem"
_OWN_KEY = "encryption_key=ephemeral"
"""kata-agent refuses it without CREATE_FILESYSTEM. Source of both: its storage/block_handler.rs."""


def empty_dir_disk(config: Config, directory: str) -> tuple[BlockDevice, Storage]:
    """The disk on `<directory>/disk.img`, and what the agent does with it; they stay until the sandbox ends.

    With `block-encrypted` the key is made in the guest and never leaves it; a plain one gives back what is freed.
    """
    encrypted = config.runtime.emptydir_mode == "block-encrypted"
    file = f"{directory}/disk.img"
    name = digest(file)
    storage = Storage(
        driver="",
        driver_options=(_OWN_KEY, CREATE_FILESYSTEM) if encrypted else (CREATE_FILESYSTEM,),
        source="",
        fs_type="ext4",
        options=() if encrypted else ("discard",),
        mount_point=GuestPath(f"{GUEST_SANDBOX_DIR}/storage/{name}"),
        shared=True,
    )
    return disk(config, device_id=f"blk-{name}", path=file, read_only=False, discard=not encrypted), storage
