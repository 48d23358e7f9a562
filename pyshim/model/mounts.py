"""Planned mounts on the host, which `host/mounts/mounting.py` makes."""

from enum import StrEnum

import msgspec

from pyshim.model.ids import HostPath
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
