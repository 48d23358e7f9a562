"""The sandbox's storages. Each mount point is mounted once, counted per container, and unmounted with the last user.

The drivers are kata-agent's. A storage of the sandbox, or one that is `shared`, stays until the sandbox ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Iterable, Sequence

from protos.agent.agent_pb2 import FSGroup, Storage
from protos.agent.types_pb2 import FSGroupChangePolicy

from guest.agent import mounts
from guest.agent.children import Children
from guest.agent.errors import AgentError, Internal, InvalidArgument, os_cause
from guest.agent.files import read_text, write_text
from guest.agent.pull.images import Images
from guest.agent.storage.copies import Watches
from guest.agent.storage.device_mapper import (
    VERITY_MODULES,
    VERITY_PREFIX,
    encrypted,
    map_device,
    unmap_device,
    verity_target,
)
from guest.agent.storage.devices import find_block_device, make_filesystem
from guest.agent.storage.hotplug import Hotplug

log = logging.getLogger(__name__)

SANDBOX = ""
_FS_GID = "fsgid="
_CREATE_DIRECTORY = "io.katacontainers.volume.overlayfs.create_directory="
_CREATE_FILESYSTEM = "create_filesystem"
_IMAGE_PULL = "image_guest_pull"
_ENCRYPTION_KEY = "encryption_key="
_HUGEPAGES = "/sys/kernel/mm/hugepages"

DRIVERS = tuple(
    "9p bind blk ephemeral image_guest_pull local mmioblk nvdimm overlayfs scsi virtio-fs watchable-bind".split()
)


class _UsedStorage:
    def __init__(self, driver: str, verified: str) -> None:
        self.driver = driver
        self.verified = verified
        """The dm-verity device below the mount; empty without one."""
        self.users: list[str] = []


class StorageTable:
    """One per sandbox. Users are container ids, or SANDBOX."""

    def __init__(self, *, children: Children, hotplug: Hotplug, images: Images) -> None:
        self._children = children
        self._hotplug = hotplug
        self._images = images
        self._watches = Watches()
        self._lock = asyncio.Lock()
        self._mounted: dict[str, _UsedStorage] = {}

    async def add(self, storages: Iterable[Storage], user: str) -> None:
        """Every storage is in place for `user`. After a failure the earlier ones stay until `release(user)`."""
        for storage in storages:
            if storage.driver == _IMAGE_PULL:
                # Before the lock, so that no other call waits for a registry.
                await self._images.prepare(storage.source)
        async with self._lock:
            for storage in storages:
                await self._add(storage, user)

    async def _add(self, storage: Storage, user: str) -> None:
        check(storage)
        target = os.path.normpath(storage.mount_point)
        known = self._mounted.get(target)
        if known is None:
            verified = await self._set_up(storage, target, user)
            known = self._mounted[target] = _UsedStorage(storage.driver, verified)
            if storage.shared:
                known.users.append(SANDBOX)
        if user not in known.users:
            known.users.append(user)

    async def release(self, user: str) -> None:
        """Storages that only `user` used are unmounted, the last mounted first. Failures are logged."""
        async with self._lock:
            for target in reversed(list(self._mounted)):
                entry = self._mounted[target]
                if user in entry.users:
                    entry.users.remove(user)
                if not entry.users:
                    del self._mounted[target]
                    self._take_down(target, entry)

    def _take_down(self, target: str, entry: _UsedStorage) -> None:
        try:
            if entry.driver == "watchable-bind":
                self._watches.stop(target)
            mounts.unmount(target)
            if entry.verified:
                unmap_device(entry.verified)
            if entry.driver != "local" and os.path.isdir(target):
                os.rmdir(target)
        except (Internal, OSError) as error:
            log.info("storage left in place", extra={"path": target, "error": error})

    # -- drivers ---------------------------------------------------------------------------------------------------

    async def _set_up(self, storage: Storage, target: str, user: str) -> str:
        """The storage is in place; the name of the device that checks it, empty without one."""
        driver, verified = storage.driver, ""
        if driver == "local":
            os.makedirs(target, exist_ok=True)
            set_directory_options(target, storage.options)
        elif driver == "ephemeral":
            self._ephemeral(storage, target)
        elif driver == "overlayfs":
            self._overlay(storage, target)
        elif driver == _IMAGE_PULL:
            if user == SANDBOX:
                raise InvalidArgument(f"storage {target!r}: an image's root needs a container")
            await self._images.make_root(storage.source, target, user)
        elif driver == "watchable-bind":
            self._watches.start(storage.source, target)
        elif driver in ("virtio-fs", "9p", "bind"):
            fstype = storage.fstype or ("bind" if driver == "bind" else "")
            mount_storage(storage.source, target, fstype, storage.options)
        else:
            verified = await self._block(storage, target)
        if storage.HasField("fs_group"):
            set_group(target, storage.fs_group, read_only="ro" in storage.options)
        return verified

    def _ephemeral(self, storage: Storage, target: str) -> None:
        if storage.fstype == "hugetlbfs":
            allocate_hugepages(storage.options)
            mount_storage(storage.source, target, storage.fstype, storage.options)
            return
        # The kernel has no option `fsgid`, which sets the directory's group.
        options = [word for word in storage.options if not word.startswith(_FS_GID)]
        mount_storage(storage.source, target, storage.fstype, options)
        set_directory_options(target, [word for word in storage.options if word.startswith(_FS_GID)])

    def _overlay(self, storage: Storage, target: str) -> None:
        for word in storage.driver_options:
            if word.startswith(_CREATE_DIRECTORY):
                os.makedirs(word[len(_CREATE_DIRECTORY) :], exist_ok=True)
        mount_storage(storage.source or "overlay", target, "overlay", storage.options)

    async def _block(self, storage: Storage, target: str) -> str:
        keys = [word for word in storage.driver_options if word.startswith(_ENCRYPTION_KEY)]
        if keys and keys != [_ENCRYPTION_KEY + "ephemeral"]:
            raise InvalidArgument(f"storage {target!r}: this agent encrypts with its own passing keys only, not {keys}")
        node = await find_block_device(self._hotplug, storage.driver, storage.source)
        if keys:
            node = await encrypted(self._children, node)
        if keys or _CREATE_FILESYSTEM in storage.driver_options:
            await make_filesystem(self._children, node, storage.fstype)
        checks = [word for word in storage.options if word.startswith(VERITY_PREFIX)]
        verified = f"verity-{os.path.basename(node)}" if checks else ""
        if verified:
            node = await map_device(self._children, verified, verity_target(checks, node), VERITY_MODULES)
        options = [word for word in storage.options if not word.startswith((_FS_GID, VERITY_PREFIX))]
        try:
            mount_storage(node, target, storage.fstype, options)
        except AgentError as error:
            if not verified:
                raise
            unmap_device(verified)
            raise Internal(f"{error} (dm-verity passes no block that does not belong to the root hash)") from error
        set_directory_options(target, [word for word in storage.options if word.startswith(_FS_GID)])
        return verified


def check(storage: Storage) -> None:
    """InvalidArgument names a malformed storage."""
    target = storage.mount_point
    if storage.driver not in DRIVERS:
        raise InvalidArgument(f"storage {target!r}: unknown driver {storage.driver!r}, known are {', '.join(DRIVERS)}")
    if not target.startswith("/") or os.path.normpath(target) == "/" or "\0" in target + storage.source:
        raise InvalidArgument(
            f"storage with driver {storage.driver!r}: mount point {target!r} is not an absolute path below /"
        )


def mount_storage(source: str, target: str, fstype: str, options: Sequence[str]) -> None:
    """The storage is mounted on `target`, which is made if missing. A mount of that type counts as done."""
    if not source or not fstype:
        raise InvalidArgument(f"storage {target!r}: no {'source' if fstype else 'fstype'}")
    if os.path.exists(target) and mounts.mounted_type(target) == fstype and "remount" not in options:
        log.info("already mounted", extra={"path": target, "fstype": fstype})
        return
    try:
        mounts.make_target(source, target, fstype)
    except OSError as error:
        raise Internal(f"make mount point {target!r}: {os_cause(error)}") from error
    mounts.mount(source, target, fstype, options)


def set_directory_options(path: str, options: Sequence[str]) -> None:
    """`mode=` (octal) and `fsgid=` of a directory are applied; a group also sets the set-gid bit."""
    mode, group = None, None
    for word in options:
        key, _, value = word.partition("=")
        try:
            if key == "mode":
                mode = int(value, 8)
            elif key == "fsgid":
                group = int(value)
        except ValueError:
            raise InvalidArgument(f"storage {path!r}: option {word!r} is not a number") from None
    if group is not None:
        os.chown(path, -1, group)
        mode = (os.stat(path).st_mode if mode is None else mode) | _SETGID
    if mode is not None:
        os.chmod(path, mode & 0o7777)


def huge_page_sizes() -> list[int]:
    """In bytes; empty if the kernel has no huge pages."""
    names = os.listdir(_HUGEPAGES) if os.path.isdir(_HUGEPAGES) else []
    return [int(name.removeprefix("hugepages-").removesuffix("kB")) << 10 for name in names]


def allocate_hugepages(options: Sequence[str]) -> None:
    """The kernel has reserved the pages of `pagesize=` and `size=` (bytes) in `options`, in addition to others. If it
    reserves fewer, they are freed, and Internal has the number.
    """
    values = dict(part.partition("=")[::2] for word in options for part in word.split(","))
    try:
        page_bytes, size_bytes = int(values["pagesize"]), int(values["size"])
        count = size_bytes // page_bytes
    except (KeyError, ValueError, ZeroDivisionError):
        raise InvalidArgument(f"hugepages: want pagesize= and size= in bytes, got {','.join(options)!r}") from None
    path = f"{_HUGEPAGES}/hugepages-{page_bytes // 1024}kB/nr_hugepages"
    try:
        before = int(read_text(path))
        write_text(path, str(before + count))
        got = int(read_text(path)) - before
        if got < count:
            write_text(path, str(before))
    except OSError as error:
        raise Internal(f"allocate hugepages in {path!r}: {os_cause(error)}") from error
    if got < count:
        raise Internal(f"allocate hugepages in {path!r}: got {got} of {count}")


# -- a volume's group, as Kubernetes' fsGroup asks for it --------------------------------------------------------------

_READ_WRITE, _READ_ONLY, _EXECUTE, _SETGID = 0o660, 0o440, 0o110, 0o2000


def set_group(root: str, fs_group: FSGroup, *, read_only: bool) -> None:
    """Everything below `root` belongs to the group, which can use it. New files inherit the group.

    With the policy OnRootMismatch nothing is done if the root is right already. Symlinks get the group and no mode.
    """
    group = fs_group.group_id
    wanted = (_READ_ONLY if read_only else _READ_WRITE) | _EXECUTE | _SETGID
    found = os.stat(root)
    if (
        fs_group.group_change_policy == FSGroupChangePolicy.OnRootMismatch
        and found.st_gid == group
        and found.st_mode & wanted == wanted
    ):
        return
    for folder, _folders, _files, fd in os.fwalk(root, topdown=False):
        with os.scandir(folder) as entries:
            for entry in entries:
                _change(entry.name, group, read_only, fd)
    _change(root, group, read_only, None)


def _change(name: str, group: int, read_only: bool, folder: int | None) -> None:
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    os.chown(name, -1, group, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(mode):
        return
    added = _READ_ONLY if read_only else _READ_WRITE
    if stat.S_ISDIR(mode):
        added |= _EXECUTE | _SETGID
    os.chmod(name, stat.S_IMODE(mode) | added, dir_fd=folder)
