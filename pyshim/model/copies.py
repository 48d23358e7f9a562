"""Host files that are copied into the guest, where it shares none with the host."""

import stat

import msgspec

from pyshim.model.ids import GuestPath


class VolumeCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A host directory or file, and its copy in the guest."""

    source: str
    guest_path: GuestPath
    follows: bool
    """The kubelet rewrites the source while it is in use, and the copy follows."""


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One directory, regular file or symbolic link of a tree; other kinds are not copied."""

    path: str
    """Relative to the tree's root; empty for the root itself."""
    mode: int
    """st_mode, kind included."""
    uid: int
    gid: int
    size_bytes: int
    """Size of a file; 0 otherwise."""
    target: str
    """Target of a link."""
    changed_ns: int
    """The time of its content's last change."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class CopiedPiece(msgspec.Struct, frozen=True, kw_only=True):
    """One CopyFile call: a directory, a link (its target the data), or a piece of a file."""

    path: GuestPath
    file_size: int
    file_mode: int
    dir_mode: int
    """Mode of parents that are made."""
    uid: int
    gid: int
    offset: int
    data: bytes
