"""Volumes: a source's facts on the host, a direct volume's record, the daemon that shares a directory."""

from collections.abc import Mapping

import msgspec

from pyshim.model.ids import HostPath
from pyshim.model.labels import NO_LABELS, ProcessLabels
from pyshim.model.mounts import SourceKind


class EmptyDir(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes emptyDir volume, or a directory in one (a subPath of it)."""

    path: str
    """The volume's own directory on the host."""
    sub_path: str
    """Path below the volume; empty for the volume itself. On a disk: below the root of its file system."""
    in_memory: bool
    """It is a tmpfs of its own, not merely a directory on one."""


class FsGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Kata's FSGroup: the volume's files belong to this group."""

    group_id: int
    only_on_root_mismatch: bool


class DirectVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume that a CSI driver recorded instead of mounting it: Kata's mountInfo.json."""

    volume_path: str
    """The source of the spec's mount."""
    record_dir: str
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
    """Kata's: 1 bytes, 2 inodes."""


class VolumeStats(msgspec.Struct, frozen=True, kw_only=True):
    usages: tuple[VolumeUsage, ...]
    abnormal: bool
    message: str


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A path the spec names as a source, links followed."""

    kind: SourceKind
    fs_type: str = ""
    """`tmpfs` or `hugetlbfs`; empty for every other file system."""
    size_bytes: int = 0
    """Size of that file system; 0 where it has no limit."""
    page_bytes: int = 0
    """Page size of a hugetlbfs."""
    mode: int = 0
    gid: int = 0
    empty_dir: EmptyDir | None = None
    device_path: str = ""
    """The node in /dev of a block device."""
    vhost_user_socket: str = ""
    """Socket of the program that serves this block device; the host has no node of it."""
    is_read_only_device: bool = False
    has_mounts_below: bool = False
    """Something is mounted below it; found for directories that are shared read-only."""
    direct: DirectVolume | None = None


class VirtiofsdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One virtiofsd: `listen_path` is bound by us and handed over as a listening fd; flags follow the flavour found."""

    binary: HostPath
    shared_dir: HostPath
    listen_path: HostPath
    cache: str
    extra_args: tuple[str, ...]
    debug: bool
    dumps_core: bool = False
    """A crash may write a core; the guest's memory is mapped."""
    labels: ProcessLabels = NO_LABELS
