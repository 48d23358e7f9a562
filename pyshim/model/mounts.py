"""Mounts on the host, decided: what `host/mounts/mounting.py` carries out, one value per mount(2) sequence."""

from enum import StrEnum

import msgspec

from pyshim.model.ids import HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind


class Propagation(StrEnum):
    PRIVATE = "private"
    SHARED = "shared"
    SLAVE = "slave"


class TargetKind(StrEnum):
    """The mount point's kind of file; it is created when missing."""

    DIRECTORY = "directory"
    FILE = "file"
    LIKE_SOURCE = "like-source"
    """A file when the source is anything but a directory (bind mounts)."""


class SourceKind(StrEnum):
    """The kind of a volume's source on the host, found before planning."""

    DIRECTORY = "directory"
    FILE = "file"
    BLOCK = "block"
    OTHER = "other"
    MISSING = "missing"


class HostMount(msgspec.Struct, frozen=True, kw_only=True):
    """One mount: `options` are fstab words (`ro`, `rbind`, `loop`, `lowerdir=...`), applied as containerd does."""

    type: str
    source: str
    target: HostPath
    target_kind: TargetKind
    options: tuple[str, ...]
    propagation: Propagation | None
    beneath: HostPath | None
    """When set, the target is opened beneath this root and no link leads out of it: the tree is shared with a guest."""

    for_guest_only: bool = False
    """Made in virtiofsd's mount namespace, where it has one, instead of the host's."""

    def intent(self) -> LedgerEntry:
        """The ledger's entry, made before the mount. Its undo must not follow a guest's links out of the tree."""
        detail = {} if self.beneath is None else {"beneath": self.beneath}
        return LedgerEntry(kind=ResourceKind.MOUNT, key=self.target, detail=detail)
