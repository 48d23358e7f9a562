"""Root file systems on disks: one file system, or an image's layers below an overlay that the guest mounts. Pure.

containerd's EROFS snapshotter (2.2 and later) leaves the mounts of layers to the shim: the `ext4` file for writes if
there is one, one `erofs` mount for each layer, the top one first, and an overlay whose options name them by their
position, as `{{ mount N }}` and `{{ overlay FIRST LAST }}`. Source: containerd's EROFS snapshotter and mount manager.
"""

import re
from collections.abc import Sequence

import msgspec

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, GuestPath
from pyshim.model.plans import DiskUse
from pyshim.model.task import RootfsMount
from pyshim.resources.volumes.plan.disk_volumes import DISK_TYPES, NEW_ENCRYPTED, disk_id, disk_storage
from pyshim.resources.volumes.plan.disks import digest, disk
from pyshim.resources.volumes.plan.layers import VERITY_OPTION, is_layer
from pyshim.resources.volumes.plan.share import guest_container_dir

_LAYERS_DIR = "/run/layers"
"""In the guest. Short, so that as many layers as an image of Docker's may have (127) fit the options of one mount."""
_CREATE_DIRECTORY = "io.katacontainers.volume.overlayfs.create_directory="
_MAKE_DIRECTORY = "X-containerd.mkdir.path="
_INCOMPLETE = ("format/", "mkdir/", "mkfs/")
"""Prefixes of the types of mounts that must be completed before they can be made."""
_OVERLAYS = ("overlay", "format/overlay", "format/mkdir/overlay")
_REFUSED_OPTIONS = ("device=", "uidmap=", "gidmap=", VERITY_OPTION)
"""dm-verity by its file: `look_at_layers` has put what the file says in its place."""
_TEMPLATE = re.compile(r"\{\{ *(?:mount (?P<only>\d{1,4})|overlay (?P<first>\d{1,4}) (?P<last>\d{1,4})) *\}\}")
_MOUNT_OPTIONS_BYTES = 4095
"""The most that mount(2) takes."""


class GuestRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A root file system that the guest mounts by itself."""

    mount_point: GuestPath
    disks: tuple[DiskUse, ...] = ()
    storages: tuple[Storage, ...] = ()
    """Mounted after the disks' own."""


def root_disks(rootfs: Sequence[RootfsMount], config: Config, container_id: ContainerId) -> GuestRoot | None:
    """The disks of a root file system; None if the host mounts it.

    EROFS files are disks even with `disable_block_device_use`: containerd leaves them to a shim that plugs them.

    Raises InvalidArgument or Unimplemented naming the mount.
    """
    what = f"mount root file system of '{container_id}'"
    incomplete = [mount for mount in rootfs if mount.type.startswith(_INCOMPLETE)]
    layers = [mount for mount in rootfs if is_layer(mount)]
    if not incomplete and (len(rootfs) < 2 or not layers):
        return _one_disk(rootfs, config, container_id, what)
    for mount in incomplete:
        if mount.type not in _OVERLAYS:
            raise Unimplemented(f"{what}: type {mount.type!r} of '{mount.source}' is not supported")
    *below, overlay = rootfs
    if overlay.type not in _OVERLAYS or not layers:
        raise InvalidArgument(f"{what}: {', '.join(mount.type for mount in rootfs)} make no overlay of layers")
    return GuestRoot(
        mount_point=_root(container_id),
        disks=tuple(_layer_or_upper(mount, config, what) for mount in below),
        storages=(_overlay(overlay, below, container_id, what),),
    )


def _one_disk(rootfs: Sequence[RootfsMount], config: Config, container_id: ContainerId, what: str) -> GuestRoot | None:
    """One file system on one block device or in one file, as the devmapper and blockfile snapshotters give it."""
    if len(rootfs) != 1:
        return None
    (mount,) = rootfs
    if config.hypervisor.disable_block_device_use and not is_layer(mount):
        return None
    if mount.type not in DISK_TYPES or not mount.source.startswith("/") or mount.target.strip("/"):
        return None
    _check_options(mount, what)
    device = disk(
        config,
        device_id=f"root-{digest(container_id)}",
        path=mount.source,
        read_only="ro" in mount.options,
        discard="discard" in mount.options,
    )
    storage = disk_storage(mount.type, mount.options, _root(container_id))
    return GuestRoot(mount_point=storage.mount_point, disks=(DiskUse(disk=device, storage=storage, container_path=""),))


def _layer_or_upper(mount: RootfsMount, config: Config, what: str) -> DiskUse:
    """A layer is one disk for all containers of the pod; `emptydir_mode` says whether the upper file is encrypted."""
    _check_options(mount, what)
    if not is_layer(mount) and (mount.type != "ext4" or "ro" in mount.options):
        raise Unimplemented(f"{what}: type {mount.type!r} of '{mount.source}' below an overlay is not supported")
    is_encrypted = not is_layer(mount) and config.runtime.emptydir_mode == "block-encrypted"
    driver_options = NEW_ENCRYPTED if is_encrypted else ()
    return DiskUse(
        disk=disk(config, device_id=disk_id(mount.source), path=mount.source, read_only=is_layer(mount)),
        storage=disk_storage(mount.type, mount.options, _point(mount), driver_options=driver_options),
        container_path="",
    )


def _overlay(mount: RootfsMount, below: Sequence[RootfsMount], container_id: ContainerId, what: str) -> Storage:
    """The overlay that the guest makes of `below`; without an upper file, what is written stays in its memory."""
    _check_options(mount, what)
    points = [_point(each) for each in below]
    options, on_host, directories = [], [], []
    for option in mount.options:
        text = _completed(option, points, what)
        if option.startswith(_MAKE_DIRECTORY):
            directories.append(text.removeprefix(_MAKE_DIRECTORY).partition(":")[0])
        elif text == option and option.startswith(("upperdir=", "workdir=")):
            on_host.append(option)
        else:
            options.append(text)
    _check_order(options, below, what)
    if on_host:  # the guest has no directories of the host
        directories = [f"{guest_container_dir(container_id)}/{name}" for name in ("upper", "work")]
        options += [f"upperdir={directories[0]}", f"workdir={directories[1]}"]
    size_bytes = len(",".join(options))
    if size_bytes > _MOUNT_OPTIONS_BYTES:
        raise InvalidArgument(
            f"{what}: the overlay of {len(below)} layers needs {size_bytes} bytes of mount options, "
            f"at most {_MOUNT_OPTIONS_BYTES} are possible"
        )
    return Storage(
        driver="overlayfs",
        driver_options=tuple(f"{_CREATE_DIRECTORY}{path}" for path in directories),
        source="overlay",
        fs_type="overlay",
        options=tuple(options),
        mount_point=_root(container_id),
    )


def _completed(option: str, points: Sequence[str], what: str) -> str:
    """The option with the guest's mount points for the positions it names."""

    def named(found: re.Match[str]) -> str:
        first, last = (found["only"],) * 2 if found["only"] else (found["first"], found["last"])
        chosen = points[int(first) : int(last) + 1]
        if not chosen or int(last) >= len(points):
            raise InvalidArgument(f"{what}: overlay option {option!r} names a mount that is not in the list")
        return ":".join(chosen)

    text = _TEMPLATE.sub(named, option)
    if "{{" in text:
        raise Unimplemented(f"{what}: overlay option {option!r} is not understood")
    return text


def _check_order(options: Sequence[str], below: Sequence[RootfsMount], what: str) -> None:
    """Raises InvalidArgument unless the overlay has every layer, in the order of the list, and the file for writes."""
    layers = [_point(mount) for mount in below if is_layer(mount)]
    files = [_point(mount) for mount in below if not is_layer(mount)]
    uppers = [option for option in options if option.startswith("upperdir=")]
    lowers = [option for option in options if option.startswith("lowerdir=")]
    if lowers != [f"lowerdir={':'.join(layers)}"] or len({*layers, *files}) != len(below):
        raise InvalidArgument(f"{what}: its overlay does not have each of {len(layers)} layers once, the top one first")
    if len(files) != len(uppers) or not all(uppers[0].startswith(f"upperdir={file}/") for file in files):
        raise InvalidArgument(f"{what}: its overlay does not write to its one file for writes")


def _check_options(mount: RootfsMount, what: str) -> None:
    for option in mount.options:
        if option.startswith(_REFUSED_OPTIONS):
            name = option.partition("=")[0]
            raise Unimplemented(f"{what}: option '{name}' of '{mount.source}' is not supported")


def _point(mount: RootfsMount) -> str:
    """The same for all containers of the pod, so that the guest mounts a layer once."""
    return f"{_LAYERS_DIR}/{digest(mount.source)}"


def _root(container_id: ContainerId) -> GuestPath:
    return GuestPath(f"{guest_container_dir(container_id)}/rootfs")
