"""Copies of host files in a guest that shares no files with the host (`shared_fs = "none"`)."""

import stat

import msgspec

from pyshim.model.ids import GuestPath


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
