"""Reads the table of mounts and unmounts. Few imports: `delete` and the ledger's undo use it."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pyshim.host import syscalls

if TYPE_CHECKING:
    from pyshim.model.volumes import MountedFile

_TABLE = "/proc/thread-self/mountinfo"
"""A thread may be in a mount namespace of its own."""


class MountRow(NamedTuple):
    """A row of the table."""

    id: int
    device: str
    """The file system's device number, `MAJOR:MINOR`."""
    root: str
    """The directory of the file system that is mounted; `/` for all of it."""
    point: str
    kind: str
    options: tuple[str, ...]
    """Of the file system, not of this mount of it."""


def mounts(table: str = _TABLE) -> Iterator[MountRow]:
    """All of a mount namespace, in mounting order. Raises OSError. Source: proc(5), /proc/pid/mountinfo."""
    with open(table, "rb") as lines:
        for line in lines:
            ours, _, theirs = line.partition(b" - ")
            number, _, device, root, point, *_ = ours.split(b" ")
            kind, *_, options = theirs.split()
            yield MountRow(
                int(number),
                device.decode(),
                _unescaped(root),
                _unescaped(point),
                os.fsdecode(kind),
                tuple(os.fsdecode(options).split(",")),
            )


def mounted_below(path: str) -> tuple[str, ...]:
    """Mount points at or below `path` in this mount namespace, in the order to unmount them.

    A path with several mounts is listed as often.
    """
    root = _resolved_but_last(path)
    prefix = root if root.endswith("/") else root + "/"
    points = [each.point for each in mounts() if each.point == root or each.point.startswith(prefix)]
    # The table is in mounting order: an upper mount comes after the one below it.
    points.reverse()
    return tuple(points)


def mounted_files(paths: Collection[str]) -> "dict[str, MountedFile]":
    """Where each path that exists leads, links followed, by one look at the table. Raises OSError."""
    from pyshim.model.volumes import MountedFile  # it needs msgspec, which `delete` does without

    wanted: dict[str, tuple[str, int]] = {}
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            wanted[path] = os.path.realpath(path), syscalls.statx(path).mount_id
    ids = {mount_id for _, mount_id in wanted.values()}
    covering: dict[int, MountRow] = {}
    below: dict[str, list[int]] = {path: [] for path, _ in wanted.values()}
    for row in mounts():
        if row.id in ids:
            covering[row.id] = row
        above = os.path.dirname(row.point)
        while above != "/":
            if above in below:
                below[above].append(row.id)
            above = os.path.dirname(above)
    return {
        asked: MountedFile(_file(covering[mount_id], path), mount_id, tuple(below[path]))
        for asked, (path, mount_id) in wanted.items()
        if mount_id in covering
    }


def _file(row: MountRow, path: str) -> str:
    inside = os.path.normpath(f"{row.root}/{path.removeprefix(row.point)}").lstrip("/")
    return f"{row.device}/{inside}" if inside else row.device


def mount_root(path: str) -> str | None:
    """The directory of its file system that is mounted at `path`, `/` for all of it; None without a mount there."""
    return next((each.root for each in reversed(list(mounts())) if each.point == path), None)


def _unescaped(field: bytes) -> str:
    """The kernel writes space, tab, newline and backslash as a backslash and three octal digits."""
    head, *rest = field.split(b"\\")
    return os.fsdecode(head + b"".join(bytes((int(part[:3], 8),)) + part[3:] for part in rest))


def has_mount(path: str) -> bool:
    """Something is mounted at `path`; a symbolic link as the last component is not followed. Raises OSError."""
    point = _resolved_but_last(path)
    return any(each.point == point for each in mounts())


def unmount_all(path: str) -> None:
    """Nothing is mounted at `path` any more: every layer is detached lazily, with all that is mounted below it.

    Idempotent: success for a path that does not exist or is not a mount point. A symbolic link as the last component is
    not followed. The table says how many layers there are: a call without one can take as long as an unmount, and
    containerd repeats the removal of a task that takes more than ten seconds. Raises OSError.
    """
    point = _resolved_but_last(path)
    for _ in [each for each in mounts() if each.point == point]:
        try:
            syscalls.umount2(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except OSError as error:
            # EINVAL: not a mount point any more, or a symbolic link.
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise


def _resolved_but_last(path: str) -> str:
    """The path as the table has it; a link as its last component is not followed."""
    above, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(above), name)


def unmount_beneath(root: str, path: str) -> None:
    """As `unmount_all(path)`, for a path below `root` whose directories a guest may have exchanged for links.

    The walk cannot leave `root`, so only mounts below it are detached. A path that now leads out of it is success:
    mounts left below `root` are detached with the mount on `root`. Raises OSError.
    """
    above, name = os.path.split(os.path.relpath(path, root))
    if name in ("", ".", "..") or above.startswith(".."):
        raise OSError(errno.EINVAL, f"not a path below {root!r}", path)
    try:
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        # As make_target resolved it: a link that stays in the tree was followed when the mount was made.
        resolve = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
        above_fd = syscalls.openat2(root_fd, above or ".", os.O_PATH | os.O_DIRECTORY, resolve=resolve)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
            return
        raise
    finally:
        os.close(root_fd)
    try:
        unmount_all(f"/proc/self/fd/{above_fd}/{name}")
    finally:
        os.close(above_fd)
