"""Examines the sources of a spec's mounts: kind, file system, emptyDir, block device, direct volume. Blocking.

Nothing is changed, and only the record of a direct volume is opened. `/dev/block/MAJOR:MINOR` is udev's name of a block
device; sysfs resolves it, so that it also works without udev.
"""

import base64
import fcntl
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.table import mount_root
from pyshim.model.decoding import Text, damaged, from_json
from pyshim.model.errors import InvalidArgument
from pyshim.model.places import DIRECT_VOLUMES
from pyshim.model.volumes import DirectVolume, EmptyDir, SourceFacts, SourceKind
from pyshim.resources.volumes.host.vhost_user import backend_socket, is_vhost_user

MOUNT_INFO = "mountInfo.json"
_EMPTY_DIR = "kubernetes.io~empty-dir"
_MAX_RECORD_BYTES = 64 * 1024
_NAME_MAX = 255
_BLKROGET = 0x125E
_MAGICS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}
_BY_NUMBER = re.compile(r"/dev/block/(\d{1,7}):(\d{1,7})")
# pods/<uid>/volume-subpaths/<volume>/<container>/<index>, where the kubelet binds what a subPath names.
_SUB_PATH = re.compile(r"(?P<pod>.+)/volume-subpaths/(?P<volume>[^/]+)/[^/]+/[^/]+")


def source_facts(path: str, vhost_user_store: str = "", *, direct_volumes: str = DIRECT_VOLUMES) -> SourceFacts:
    """The facts of `path`; MISSING if there is no file. With a store, devices with its numbers are its disks.

    Raises InvalidArgument for a direct volume whose record is broken, and what `backend_socket` does.
    """
    direct = direct_volume(path, root=direct_volumes)
    if numbers := _BY_NUMBER.fullmatch(path):
        if vhost_user_store and is_vhost_user(int(numbers[1])):
            return _vhost_user(vhost_user_store, int(numbers[1]), int(numbers[2]))
        path = _node(int(numbers[1]), int(numbers[2]))
    try:
        found = os.stat(path)
    except OSError:
        return SourceFacts(kind=SourceKind.MISSING, direct=direct)
    if stat.S_ISDIR(found.st_mode):
        return _with_identity(_directory_facts(path, found, direct), path, found)
    if stat.S_ISBLK(found.st_mode):
        if vhost_user_store and is_vhost_user(os.major(found.st_rdev)):
            return _vhost_user(vhost_user_store, os.major(found.st_rdev), os.minor(found.st_rdev))
        return SourceFacts(
            kind=SourceKind.BLOCK,
            device_path=os.path.realpath(path),
            is_read_only_device=_is_read_only(path),
            direct=direct,
        )
    kind = SourceKind.FILE if stat.S_ISREG(found.st_mode) else SourceKind.OTHER
    return _with_identity(SourceFacts(kind=kind, direct=direct), path, found)


def _with_identity(facts: SourceFacts, path: str, found: os.stat_result) -> SourceFacts:
    """The time of birth differs when a file system gives the inode number of a removed file to a new one."""
    try:
        birth_ns, flags = syscalls.statx(path).birth_ns, os.statvfs(path).f_flag
    except OSError:  # it went away between two looks
        return SourceFacts(kind=SourceKind.MISSING, direct=facts.direct)
    return replace(facts, identity=f"{found.st_dev}:{found.st_ino}:{birth_ns}:{flags}", mount_flags=flags)


def _vhost_user(store: str, major: int, minor: int) -> SourceFacts:
    return SourceFacts(kind=SourceKind.BLOCK, vhost_user_socket=backend_socket(store, major, minor))


def _directory_facts(path: str, found: os.stat_result, direct: DirectVolume | None) -> SourceFacts:
    try:
        fs_type = _MAGICS.get(syscalls.file_system_magic(path), "")
        limits = os.statvfs(path)
    except OSError:  # it went away between two looks
        return SourceFacts(kind=SourceKind.MISSING, direct=direct)
    return SourceFacts(
        kind=SourceKind.DIRECTORY,
        fs_type=fs_type,
        size_bytes=limits.f_blocks * limits.f_frsize,
        page_bytes=limits.f_bsize if fs_type == "hugetlbfs" else 0,
        mode=stat.S_IMODE(found.st_mode),
        gid=found.st_gid,
        empty_dir=_empty_dir(path, found, fs_type),
        direct=direct,
    )


def _empty_dir(path: str, found: os.stat_result, fs_type: str) -> EmptyDir | None:
    above, name = os.path.split(path.rstrip("/"))
    if os.path.basename(above) == _EMPTY_DIR and name not in (".", ".."):
        return EmptyDir(path=path.rstrip("/"), sub_path="", in_memory=fs_type == "tmpfs" and _is_mount(path, found))
    below = _SUB_PATH.fullmatch(path.rstrip("/"))
    if below is None or fs_type == "hugetlbfs":
        return None
    volume = f"{below['pod']}/volumes/{_EMPTY_DIR}/{below['volume']}"
    try:
        status = os.stat(volume)
    except OSError:
        return None
    inside = mount_root(path.rstrip("/"))
    if not _is_mount(volume, status):
        return EmptyDir(path=volume, sub_path=(inside or "").strip("/") or ".", in_memory=False)
    if fs_type != "tmpfs" or status.st_dev != found.st_dev or inside is None:
        return None
    return EmptyDir(path=volume, sub_path=inside.strip("/"), in_memory=True)


def _is_mount(path: str, found: os.stat_result) -> bool:
    return os.stat(os.path.dirname(path.rstrip("/"))).st_dev != found.st_dev


def _node(major: int, minor: int) -> str:
    """The device's node in /dev; a path that is not there when the kernel has no such block device."""
    with suppress(OSError, KeyError):
        with open(f"/sys/dev/block/{major}:{minor}/uevent", encoding="utf-8") as file:
            names = dict(line.rstrip("\n").partition("=")[::2] for line in file)
        node = f"/dev/{names['DEVNAME']}"
        if os.stat(node).st_rdev == os.makedev(major, minor):
            return node
    return f"/dev/block/{major}:{minor}"


def _is_read_only(path: str) -> bool:
    with suppress(OSError), OwnedFd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        return any(fcntl.ioctl(fd.fileno(), _BLKROGET, b"\0\0\0\0"))
    return False  # opening it for work raises with the reason


def record_directory(volume_path: str, *, root: str = DIRECT_VOLUMES) -> str | None:
    """The directory of the volume's record, if it has one: the path in URL-safe base64, Kata's convention."""
    name = base64.urlsafe_b64encode(os.fsencode(volume_path)).decode()
    return f"{root}/{name}" if len(name) <= _NAME_MAX else None


def direct_volume(volume_path: str, *, root: str = DIRECT_VOLUMES) -> DirectVolume | None:
    """The record of a volume, None without one. Raises InvalidArgument naming the record that cannot be read."""
    directory = record_directory(volume_path, root=root)
    if directory is None:
        return None
    try:
        with open(f"{directory}/{MOUNT_INFO}", "rb") as file:
            data = file.read(_MAX_RECORD_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidArgument(f"read '{directory}/{MOUNT_INFO}': {error.strerror}") from error
    return parse_mount_info(data, volume_path, directory)


class _MountInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Go writes an empty list or object as null."""

    volume_type: Text = msgspec.field(name="volume-type", default="")
    device: Text = ""
    fs_type: Text = msgspec.field(name="fstype", default="")
    options: tuple[str, ...] | None = None
    metadata: Mapping[str, str] | None = None


def parse_mount_info(data: bytes, volume_path: str, directory: str) -> DirectVolume:
    """The record in `data`, Kata's keys; pure."""
    where = f"{directory}/{MOUNT_INFO}"
    if len(data) > _MAX_RECORD_BYTES:
        raise InvalidArgument(f"read '{where}': larger than {_MAX_RECORD_BYTES} bytes")
    info = from_json(data, _MountInfo, damaged(where))
    return DirectVolume(
        volume_path=volume_path,
        record_dir=directory,
        volume_type=info.volume_type,
        device=info.device,
        fs_type=info.fs_type,
        options=info.options or (),
        metadata=info.metadata or {},
    )
