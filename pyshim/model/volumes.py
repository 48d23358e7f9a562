"""What the host knows of a volume's source, and what a direct volume's record says: found before planning."""

from collections.abc import Mapping

from pyshim.model.dataclasses import dataclass
from pyshim.model.mounts import SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyDir:
    """A Kubernetes emptyDir volume, or a directory in one (a subPath of it)."""

    path: str
    """The volume's own directory on the host."""
    sub_path: str
    """Below it; empty for the volume itself. On disk it is below the root of the disk's file system instead."""
    in_memory: bool
    """It is a tmpfs of its own, not merely a directory on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsGroup:
    """Kata's FSGroup: the volume's files belong to this group."""

    group_id: int
    only_on_root_mismatch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectVolume:
    """A volume that a CSI driver recorded instead of mounting it: Kata's mountInfo.json."""

    volume_path: str
    """What the spec's mount names as its source."""
    record_dir: str
    volume_type: str
    device: str
    fs_type: str
    options: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeUsage:
    """One row of a volume's statistics."""

    total: int
    available: int
    used: int
    unit: int
    """Kata's: 1 bytes, 2 inodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeStats:
    usages: tuple[VolumeUsage, ...]
    abnormal: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """A path the spec names as a source, links followed."""

    kind: SourceKind
    fs_type: str = ""
    """`tmpfs` or `hugetlbfs`; empty for every other file system."""
    size_bytes: int = 0
    """Of that file system; 0 where it has no limit."""
    page_bytes: int = 0
    """Of a hugetlbfs."""
    mode: int = 0
    gid: int = 0
    empty_dir: EmptyDir | None = None
    device_path: str = ""
    """The node in /dev of a block device."""
    vhost_user_socket: str = ""
    """Where the program listens that serves this block device, which the host itself has not."""
    is_read_only_device: bool = False
    direct: DirectVolume | None = None
