"""The node's files, below a root that is usually `/`."""

import os
import posixpath
import shutil
import stat

from pyshim.host.files import replace_file
from pyshim.model.errors import FailedPrecondition

_MAX_LINKS = 40
"""The number of links that Linux follows. Source: path_resolution(7)."""
Found = tuple[bytes, int] | str | None
"""A file's content and mode, a link's target, or nothing."""


class Disk:
    """Paths are absolute paths of the node; `root` is put before them. Calls raise OSError."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def at(self, path: str) -> str:
        return self.root + path

    def read(self, path: str) -> Found:
        """The file or link at `path`, or None. Raises FailedPrecondition for a directory, a device or the like."""
        try:
            mode = os.lstat(self.at(path)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(mode):
            return os.readlink(self.at(path))
        if not stat.S_ISREG(mode):
            raise FailedPrecondition(f"read '{path}': it is neither a file nor a link")
        with open(self.at(path), "rb") as file:
            return file.read(), stat.S_IMODE(mode)

    def resolved(self, path: str) -> str:
        """The path that `path` leads to, links followed below the root. Raises FailedPrecondition for links in a loop.

        With another root than `/`, links of directories on the way are followed, too: to the kernel their targets are
        paths of this node.
        """
        found, rest, followed = "", path.strip("/").split("/"), 0
        while rest:
            name = rest.pop(0)
            if name in ("", "."):
                continue
            if name == "..":
                found = posixpath.dirname(found).rstrip("/")
                continue
            found = f"{found}/{name}"
            if (rest and not self.root) or not os.path.islink(self.at(found)):
                continue
            target, followed = os.readlink(self.at(found)), followed + 1
            if followed > _MAX_LINKS:
                raise FailedPrecondition(f"follow '{path}': its links are a loop")
            found = "" if target.startswith("/") else posixpath.dirname(found).rstrip("/")
            rest = [*target.strip("/").split("/"), *rest]
        return found or "/"

    def names(self, path: str) -> list[str]:
        """The names in a directory; empty without it."""
        try:
            return sorted(os.listdir(self.at(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_read_only(self, path: str) -> bool:
        """`path` is, or would be, on a file system that is mounted read-only, as the store of NixOS is."""
        there = self.at(path)
        while not os.path.lexists(there):
            there = posixpath.dirname(there)
        return bool(os.statvfs(there).f_flag & os.ST_RDONLY)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(self.at(path))

    # ---- changes

    def write(self, path: str, found: Found) -> None:
        """The path has `found`, by an atomic replacement, or is removed. A replaced file keeps its owner."""
        there = self.at(path)
        if found is None:
            os.unlink(there)
        elif isinstance(found, str):
            aside = f"{there}.{os.getpid()}~"
            os.symlink(found, aside)
            os.rename(aside, there)
        else:
            try:
                status = os.lstat(there)
                owner = (status.st_uid, status.st_gid)
            except FileNotFoundError:
                owner = None
            replace_file(there, found[0], mode=found[1], durable=True, owner=owner)

    def make_directory(self, path: str) -> None:
        os.mkdir(self.at(path), 0o755)

    def remove_directory(self, path: str) -> None:
        """The directory, which must be empty, is gone."""
        os.rmdir(self.at(path))

    def move(self, source: str, target: str) -> None:
        os.rename(self.at(source), self.at(target))

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(self.at(path), ignore_errors=False)
