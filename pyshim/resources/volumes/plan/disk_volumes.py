"""Volumes that are disks: the device to plug, and the guest's mount of it. Pure."""

from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import GuestPath
from pyshim.model.oci import OciMount
from pyshim.model.plans import DiskUse
from pyshim.model.vm import BlockDevice
from pyshim.model.volumes import DirectVolume, FsGroup, SourceFacts, SourceKind
from pyshim.resources.volumes.plan.disks import digest, disk, vhost_user_disk
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR
from pyshim.resources.volumes.plan.volume import Volume, made_directory, moved

DISK_TYPES = ("ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "squashfs", "erofs", "iso9660", "f2fs")
_CREATE_FILESYSTEM = "create_filesystem"
NEW_ENCRYPTED = ("encryption_key=ephemeral", _CREATE_FILESYSTEM)
"""A new file system with a key of the guest's own. kata-agent refuses the one without the other.
Source: its storage/block_handler.rs."""
_DIRECT_BLOCK_TYPES = ("block", "directvol", "rawblock")
"""Volume types of a disk: that of Kata's Go runtime, of its Rust one, and an old spelling of the latter."""
_FS_GROUP_POLICIES = {"": False, "Always": False, "OnRootMismatch": True}


def direct_volume(mount: OciMount, volume: DirectVolume, config: Config) -> Volume:
    """A volume that a CSI driver recorded instead of mounting it on the host.

    Raises Unimplemented or InvalidArgument naming the record.
    """
    what = f"mount direct volume '{volume.volume_path}' on '{mount.destination}'"
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
        driver_options=(_CREATE_FILESYSTEM,) if volume.metadata.get("createFilesystem") == "true" else (),
    )
    return _on_disk(mount, _file_system_disk(config, volume.device, storage, None, direct=volume))


def raw_block(mount: OciMount, facts: SourceFacts, config: Config) -> Volume:
    """A block device bound as a file: the guest binds its own node of the disk."""
    device = block_volume(config, facts, read_only=mount.is_read_only)
    storage = disk_storage("bind", ("bind",), f"{GUEST_SANDBOX_DIR}/storage/node-{digest(device.path)}")
    return _on_disk(mount, DiskUse(disk=device, storage=storage, container_path=""))


def file_system(mount: OciMount, facts: SourceFacts, config: Config) -> Volume:
    """A mount of a block device's or image file's file system, which the guest makes."""
    if facts.kind not in (SourceKind.BLOCK, SourceKind.FILE):
        raise InvalidArgument(
            f"mount volume '{mount.source}' ({mount.type}) on '{mount.destination}': neither a block device nor a file"
        )
    options = tuple(word for word in mount.options if word != "loop")
    storage = disk_storage(mount.type, options, f"{GUEST_SANDBOX_DIR}/storage/{digest(mount.source)}")
    return _on_disk(mount, _file_system_disk(config, facts.device_path or mount.source, storage, facts))


def disk_empty_dir(mount: OciMount, facts: SourceFacts, directory: str, config: Config) -> Volume:
    """The volume is a directory on its own disk: that has the kubelet's mode and group, and no `lost+found`.

    The disk is on `<directory>/disk.img` and stays until the sandbox ends. With `block-encrypted` the key is made in
    the guest and never leaves it; a plain one discards freed blocks.
    """
    encrypted = config.runtime.emptydir_mode == "block-encrypted"
    file = f"{directory}/disk.img"
    storage = disk_storage(
        "ext4",
        () if encrypted else ("discard",),
        f"{GUEST_SANDBOX_DIR}/storage/{digest(file)}",
        driver_options=NEW_ENCRYPTED if encrypted else (_CREATE_FILESYSTEM,),
    )
    device = disk(config, device_id=disk_id(file), path=file, read_only=False, discard=not encrypted)
    use = DiskUse(disk=device, storage=replace(storage, shared=True), container_path="", make_bytes=facts.size_bytes)
    point = GuestPath(f"{storage.mount_point}/volume")
    return Volume(mount=moved(mount, point, mount.options), disks=(use,), storages=(made_directory(point, facts),))


def _on_disk(mount: OciMount, use: DiskUse) -> Volume:
    assert use.storage is not None
    options = ("rbind", "ro") if mount.is_read_only else ("rbind",)
    return Volume(mount=moved(mount, use.storage.mount_point, options), disks=(use,))


def _file_system_disk(
    config: Config, device: str, storage: Storage, facts: SourceFacts | None, *, direct: DirectVolume | None = None
) -> DiskUse:
    """A device or image file with a file system, mounted in the guest as `storage` says."""
    read_only = "ro" in storage.options or (facts is not None and facts.is_read_only_device)
    discard = "discard" in storage.options
    volume = _volume(config, facts, device, read_only=read_only, discard=discard)
    return DiskUse(disk=volume, storage=storage, container_path="", direct=direct)


def block_volume(config: Config, facts: SourceFacts, *, read_only: bool) -> BlockDevice:
    """The disk over a block device, equal for every container that has it."""
    return _volume(config, facts, facts.device_path, read_only=facts.is_read_only_device or read_only, discard=False)


def _volume(config: Config, facts: SourceFacts | None, path: str, *, read_only: bool, discard: bool) -> BlockDevice:
    if facts is not None and facts.vhost_user_socket:
        return vhost_user_disk(config, device_id=disk_id(facts.vhost_user_socket), socket=facts.vhost_user_socket)
    return disk(config, device_id=disk_id(path), path=path, read_only=read_only, discard=discard)


def disk_storage(
    fs_type: str,
    options: tuple[str, ...],
    mount_point: str,
    *,
    fs_group: FsGroup | None = None,
    driver_options: tuple[str, ...] = (),
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
    )


def direct_volume_point(volume: DirectVolume) -> str:
    """Its mount point in the guest, the same for every container that has it."""
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
