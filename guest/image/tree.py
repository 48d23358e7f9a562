"""A file system tree in memory: what will be packed into a cpio archive or a root image.

Trees are built from packages, so paths are given as packages spell them and stored as a merged-/usr system sees them:
`lib/x` and `usr/lib/x` are one file. Owner is always root, the time stamp is always the constant of the recipe:
neither is part of an entry.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from guest.image.errors import BuildError

MERGED_DIRECTORIES = ("bin", "lib", "lib64", "sbin")


class Entry(NamedTuple):
    """One inode: `mode` has the type bits; `data` is a file's content or a link's target; `device` is for nodes."""

    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def merged_path(path: str) -> str:
    """`path` without leading slash or dots, as it reads when /bin, /lib, /lib64 and /sbin are links into /usr."""
    parts = PurePosixPath(path.lstrip("/")).parts
    if parts and parts[0] in MERGED_DIRECTORIES and len(parts) > 1:
        parts = ("usr", *parts)
    return "/".join(parts)


class Tree:
    """A mutable map from path to `Entry`; parents are made as needed, no entry is silently replaced by another."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __contains__(self, path: str) -> bool:
        return merged_path(path) in self._entries

    def __getitem__(self, path: str) -> Entry:
        return self._entries[merged_path(path)]

    def items(self) -> Iterator[tuple[str, Entry]]:
        """Every entry in the byte order of its path: parents come before their children."""
        return iter(sorted(self._entries.items(), key=lambda item: item[0].split("/")))

    @property
    def size_bytes(self) -> int:
        """The sum of the contents of all regular files."""
        return sum(len(entry.data) for entry in self._entries.values() if stat.S_ISREG(entry.mode))

    def add(self, path: str, entry: Entry) -> None:
        """Add one entry of any kind, and the directories above it."""
        path = merged_path(path)
        if not path or ".." in path.split("/"):
            raise BuildError(f"add {path!r} to the tree: not a path below the root")
        present = self._entries.get(path)
        if present is not None and present != entry:
            raise BuildError(f"add {path} to the tree: another entry has that name")
        parent = path.rpartition("/")[0]
        if parent:
            if parent not in self._entries:
                self.add_directory(parent)
            elif not stat.S_ISDIR(self._entries[parent].mode):
                raise BuildError(f"add {path} to the tree: {parent} is not a directory")
        self._entries[path] = entry

    def add_directory(self, path: str, permissions: int = 0o755) -> None:
        """Add a directory; one that is there keeps its permissions."""
        if path not in self:
            self.add(path, Entry(stat.S_IFDIR | permissions))

    def add_file(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        """Add a regular file."""
        self.add(path, Entry(stat.S_IFREG | permissions, data))

    def add_link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self.add(path, Entry(stat.S_IFLNK | 0o777, target.encode()))

    def add_character_device(self, path: str, major: int, minor: int, permissions: int = 0o600) -> None:
        """Add a character device node."""
        self.add(path, Entry(stat.S_IFCHR | permissions, b"", (major, minor)))

    def write_to(self, directory: Path, mtime_s: int) -> None:
        """Make the tree below the empty `directory`, every inode with the time `mtime_s`; refuses device nodes."""
        for path, entry in self.items():
            target = directory / path
            if stat.S_ISDIR(entry.mode):
                target.mkdir()
            elif stat.S_ISLNK(entry.mode):
                target.symlink_to(entry.data.decode())
            elif stat.S_ISREG(entry.mode):
                target.write_bytes(entry.data)
            else:
                raise BuildError(f"write {path}: device nodes cannot be part of a root image")
            if not stat.S_ISLNK(entry.mode):
                target.chmod(stat.S_IMODE(entry.mode))
        for path, _ in reversed(list(self.items())):
            os.utime(directory / path, (mtime_s, mtime_s), follow_symlinks=False)
        os.utime(directory, (mtime_s, mtime_s))
