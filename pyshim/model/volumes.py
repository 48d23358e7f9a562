"""Volumes: the host's mounts, what the sources of a spec's mounts are, virtiofsd, and copies in place of shares."""

import stat
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pyshim.model.confinement import NO_LABELS, ProcessLabels
from pyshim.model.ids import GuestPath, HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind


class Propagation(StrEnum):
    PRIVATE = "private"
    SHARED = "shared"
    SLAVE = "slave"


class TargetKind(StrEnum):
    """The type of file to create as mount point if there is none."""

    DIRECTORY = "directory"
    FILE = "file"
    LIKE_SOURCE = "like-source"
    """A directory if the source is one, else a file (bind mounts)."""


class SourceKind(StrEnum):
    """The type of file of a volume's source on the host."""

    DIRECTORY = "directory"
    FILE = "file"
    BLOCK = "block"
    OTHER = "other"
    MISSING = "missing"


class MountedFile(NamedTuple):
    """Where a path leads, as the table of mounts has it."""

    file: str
    """The directory or file by its file system, `MAJOR:MINOR/PATH` without a slash at the end."""
    mount_id: int
    mounts_below: tuple[int, ...]
    """The ids of the mounts below it."""


class HostMount(msgspec.Struct, frozen=True, kw_only=True):
    """One mount. `options` are those of fstab (`ro`, `rbind`, `loop`, `lowerdir=...`), applied as containerd does."""

    type: str
    source: str
    target: HostPath
    target_kind: TargetKind
    options: tuple[str, ...]
    propagation: Propagation | None
    beneath: HostPath | None
    """The root of a tree that a guest can write to; None for another target. The target is opened beneath the root, so
    that no link leads out of it."""
    for_guest_only: bool = False
    """Made in virtiofsd's mount namespace instead of the host's, if virtiofsd has its own."""

    def intent(self) -> LedgerEntry:
        """The ledger's entry, to be written before the mount. Its undo also opens the target beneath the root."""
        detail = {} if self.beneath is None else {"beneath": self.beneath}
        return LedgerEntry(kind=ResourceKind.MOUNT, key=self.target, detail=detail)


class EmptyDir(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes emptyDir volume, or a subPath of one."""

    path: str
    """The volume's directory on the host."""
    sub_path: str
    """The path below the volume (on a disk: below its file system's root); empty for the volume itself."""
    in_memory: bool
    """A tmpfs is mounted on the volume's directory."""


class FsGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Kata's FSGroup: the group to which the volume's files belong."""

    group_id: int
    only_on_root_mismatch: bool


class DirectVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume that a CSI driver has recorded in Kata's mountInfo.json instead of mounting it."""

    volume_path: str
    """The source of the spec's mount."""
    record_dir: str
    """The directory of mountInfo.json."""
    volume_type: str
    device: str
    fs_type: str
    options: tuple[str, ...]
    metadata: Mapping[str, str]


class VolumeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a volume's statistics."""

    total: int
    available: int
    used: int
    unit: int
    """1: bytes, 2: inodes, as in Kata's API."""


class VolumeStats(msgspec.Struct, frozen=True, kw_only=True):
    usages: tuple[VolumeUsage, ...]
    abnormal: bool
    message: str


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the source of a spec's mount is, symbolic links followed."""

    kind: SourceKind
    fs_type: str = ""
    """`tmpfs` or `hugetlbfs`; empty for any other file system."""
    size_bytes: int = 0
    """The size of that tmpfs or hugetlbfs; 0 without a limit."""
    page_bytes: int = 0
    """The page size of a hugetlbfs."""
    mode: int = 0
    gid: int = 0
    empty_dir: EmptyDir | None = None
    device_path: str = ""
    """The node of a block device in /dev."""
    vhost_user_socket: str = ""
    """The socket of the program that serves this block device, which has no node in /dev."""
    is_read_only_device: bool = False
    identity: str = ""
    """Equal for two looks at one directory or file by mounts with the same flags, whatever happened in between."""
    mount_flags: int = 0
    """statvfs(3)'s f_flag: read-only, noexec and their like."""
    place: str = ""
    """`MountedFile.file`; empty if nothing is there."""
    mount_id: int = 0
    mounts_below: tuple[int, ...] = ()
    direct: DirectVolume | None = None


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A volume in the share: the source is bound once for all containers of the sandbox that have it."""

    mount: HostMount
    place: str
    """`SourceFacts.place` of the source."""
    mount_flags: int
    is_directory: bool
    is_one_mount: bool
    """The source has no mounts below it, and gets none."""

    @property
    def reaches_below(self) -> bool:
        """What lies in the source may be reached by a path below the bind."""
        return self.is_one_mount and "ro" not in self.mount.options


class VirtiofsdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one virtiofsd. Its flags depend on which of the two programs it is (`VirtiofsdFlavour`)."""

    binary: HostPath
    shared_dir: HostPath
    listen_path: HostPath
    """The shim binds this socket and passes it as a listening fd."""
    cache: str
    extra_args: tuple[str, ...]
    debug: bool
    dumps_core: bool = False
    """A crash may write a core file, which contains guest memory."""
    labels: ProcessLabels = NO_LABELS


class VolumeCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A host directory or file, and the path of its copy in the guest."""

    source: str
    guest_path: GuestPath
    follows: bool
    """The copy is updated when the kubelet rewrites the source."""


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, regular file or symbolic link of a tree. Files of other types are not copied."""

    path: str
    """Relative to the tree's root; empty for the root itself."""
    mode: int
    """st_mode, with the file type."""
    uid: int
    gid: int
    size_bytes: int
    """0 unless it is a file."""
    target: str
    """The target of a link; empty otherwise."""
    changed_ns: int
    """When the content last changed, in nanoseconds since the epoch."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class CopiedPiece(msgspec.Struct, frozen=True, kw_only=True):
    """One CopyFile call: a directory, a link (`data` is its target) or a piece of a file."""

    path: GuestPath
    file_size: int
    file_mode: int
    dir_mode: int
    """The mode of parent directories that the agent makes."""
    uid: int
    gid: int
    offset: int
    data: bytes
