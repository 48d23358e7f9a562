"""Volumes: what their sources are on the host, direct volumes, and virtiofsd."""

from collections.abc import Mapping

import msgspec

from pyshim.model.ids import HostPath
from pyshim.model.labels import NO_LABELS, ProcessLabels
from pyshim.model.mounts import SourceKind


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
    has_mounts_below: bool = False
    """A mount is below it; only looked for if the directory is shared read-only."""
    direct: DirectVolume | None = None


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
