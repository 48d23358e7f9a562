"""Files and trees of files: listed, read in pieces, removed, replaced whole.

Trees may be written by a pod while the shim works on them. Names are resolved beneath the root and links are never
followed, so the shim reads and removes files inside the tree only. The kubelet or the operator chooses the root of a
tree to read, which may be a link.

Copies keep the holes of a file. A directory is locked with flock(2), which ends with the process that has the lock.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.model.errors import FailedPrecondition, ResourceExhausted
from pyshim.model.volumes import TreeEntry

MAX_ENTRIES = 20_000
MAX_TREE_BYTES = 512 << 20
"""Bytes of the guest's memory that one copy may take: a larger volume needs a disk or a share."""
MAX_DEPTH = 64
_OPEN_LEVELS = 32
"""Directories open at once while a tree is removed: far below the usual limit of 1024 descriptors."""
_MAX_PASSES = 4096
"""Passes over one tree, each of which takes _OPEN_LEVELS levels away: a pod may add to the tree meanwhile."""
ASIDE = "~"
"""The end of the name of a file that `replace_file` is writing; the name begins with a dot."""
_BENEATH = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_BENEATH


def list_tree(root: str) -> tuple[TreeEntry, ...]:
    """The root first, each directory before what is in it. Raises OSError, ResourceExhausted for a tree too large.

    Sockets, devices and FIFOs are left out, and so are files that vanish meanwhile.
    """
    entries: list[TreeEntry] = []
    total_bytes = 0
    for entry in _walk(root):
        total_bytes += entry.size_bytes
        if len(entries) >= MAX_ENTRIES or total_bytes > MAX_TREE_BYTES:
            raise ResourceExhausted(
                f"copy '{root}' into the guest: more than {MAX_ENTRIES} files or {MAX_TREE_BYTES >> 20} MiB"
            )
        entries.append(entry)
    return tuple(entries)


def _walk(root: str) -> Iterator[TreeEntry]:
    fd = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        yield _entry("", status, "")
        if stat.S_ISDIR(status.st_mode):
            yield from _below(fd, "", 0)
    finally:
        os.close(fd)


def _below(parent: int, prefix: str, depth: int) -> Iterator[TreeEntry]:
    """The entries of the directory `parent` (an O_PATH descriptor), in the order of names."""
    if depth >= MAX_DEPTH:
        raise ResourceExhausted(f"copy '{prefix}' into the guest: directories are nested more than {MAX_DEPTH} deep")
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        names = sorted(os.listdir(readable))
    finally:
        os.close(readable)
    for name in names:
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except FileNotFoundError:
            continue
        try:
            status = os.fstat(fd)
            path = f"{prefix}{name}"
            if stat.S_ISLNK(status.st_mode):
                yield _entry(path, status, os.readlink("", dir_fd=fd))
            elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                yield _entry(path, status, "")
            if stat.S_ISDIR(status.st_mode):
                yield from _below(fd, f"{path}/", depth + 1)
        finally:
            os.close(fd)


def _entry(path: str, status: os.stat_result, target: str) -> TreeEntry:
    return TreeEntry(
        path=path,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        size_bytes=status.st_size if stat.S_ISREG(status.st_mode) else 0,
        target=target,
        changed_ns=status.st_mtime_ns,
    )


def read_piece(root: str, path: str, offset: int, length: int) -> bytes:
    """`length` bytes of the regular file `path` beneath `root` (empty: the root itself), fewer at its end."""
    with open(_opened(root, path), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FailedPrecondition(f"read '{root}/{path}': no longer a regular file")
        data = b""
        while len(data) < length and (more := os.pread(file.fileno(), length - len(data), offset + len(data))):
            data += more
        return data


def _opened(root: str, path: str) -> int:
    # Non-blocking, so that a FIFO in a file's place is refused instead of waited for.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not path:
        return os.open(root, flags)
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return syscalls.openat2(root_fd, path, flags, resolve=_BENEATH)
    finally:
        os.close(root_fd)


@contextlib.contextmanager
def parent_of(path: str, root: str | None) -> Iterator[int | None]:
    """A descriptor of the directory above `path`; None if that is gone.

    It is opened beneath `root` without following links; without a root, as the path says. Raises OSError ELOOP where
    a link is on the way: the path would lead to a place that its maker did not mean.
    """
    above = os.path.dirname(path)
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        root_fd = os.open(root or above or ".", flags)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        fd = root_fd if root is None else _beneath(root_fd, os.path.relpath(above, root), flags)
    except BaseException:
        os.close(root_fd)
        raise
    if fd != root_fd:
        os.close(root_fd)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _beneath(root_fd: int, path: str, flags: int) -> int | None:
    try:
        return syscalls.openat2(root_fd, path, flags, resolve=_BENEATH)
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_tree(path: str, *, root: str | None = None) -> None:
    """`path` and everything below it is gone; a path that does not exist is success. `root` as in `parent_of`.

    Never follows a symbolic link and never enters a mount point, bind mounts of the same file system included (openat2,
    RESOLVE_NO_XDEV): what is still mounted there is not ours. Raises OSError EBUSY naming that mount
    point. A `path` that is a link or a file is unlinked.
    """
    name = os.path.basename(path.rstrip("/"))
    if not name:
        raise OSError(errno.EINVAL, "refused to remove the root directory", path)
    with parent_of(path.rstrip("/"), root) as above_fd:
        if above_fd is None:
            return
        top = _unlinked_or_opened(above_fd, name, path)
        if top is None:
            return
        try:
            _empty(top, path)
        finally:
            os.close(top)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=above_fd)


def _unlinked_or_opened(above_fd: int, name: str, path: str) -> int | None:
    """A descriptor of the directory `name`, or None when it was something else and is gone."""
    try:
        os.unlink(name, dir_fd=above_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise OSError(errno.EBUSY, "something is still mounted there", path) from None
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    else:
        return None
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        return syscalls.openat2(above_fd, name, flags, resolve=_BENEATH | syscalls.RESOLVE_NO_XDEV)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EBUSY, "something is still mounted there", path) from None
        raise


class _OpenDirectory(NamedTuple):
    """A directory that is being emptied."""

    fd: int
    name: str
    path: str
    names: Iterator[str]


def _empty(top: int, path: str) -> None:
    """The directory `top` is empty, unless a process adds names all the time."""
    moved: dict[str, str] = {}
    for _ in range(_MAX_PASSES):
        count = len(moved)
        _empty_once(top, path, moved)
        if len(moved) == count:
            return


def _empty_once(top: int, path: str, moved: dict[str, str]) -> None:
    """As `_empty`, but directories deeper than _OPEN_LEVELS are moved into `top` and added to `moved`.

    Without recursion, and with few descriptors, however deep the tree is.
    """
    levels = [_OpenDirectory(top, "", path, iter(os.listdir(top)))]
    try:
        while levels:
            level = levels[-1]
            name = next(level.names, None)
            if name is None:
                levels.pop()
                if levels:
                    os.close(level.fd)
                    with contextlib.suppress(FileNotFoundError):
                        os.rmdir(level.name, dir_fd=levels[-1].fd)
                continue
            where = (moved.get(name) if level.fd == top else None) or f"{level.path}/{name}"
            below = _unlinked_or_opened(level.fd, name, where)
            if below is None:
                continue
            if len(levels) < _OPEN_LEVELS:
                levels.append(_OpenDirectory(below, name, where, iter(os.listdir(below))))
                continue
            os.close(below)
            aside = f".removed-{os.getpid()}-{len(moved)}"
            os.rename(name, aside, src_dir_fd=level.fd, dst_dir_fd=top)
            moved[aside] = where
    finally:
        for level in levels[1:]:
            os.close(level.fd)


def replace_file(
    path: str,
    content: bytes,
    *,
    mode: int,
    durable: bool,
    many_writers: bool = False,
    owner: tuple[int, int] | None = None,
) -> None:
    """The file holds `content` and has exactly `mode`; when this raises, it is as it was. Raises OSError.

    `owner` is a uid and a gid; by default the file is the caller's.

    `durable`: a power cut leaves the old or the new content. Otherwise it may leave an empty file, which is enough for
    what a reboot loses anyway or can be made again. `many_writers`: processes may replace the file at the same time.
    Each writes to a temporary file with its pid in the name, which stays if the process is killed meanwhile.
    """
    directory, name = os.path.split(path)
    aside = f"{directory}/.{name}{f'.{os.getpid()}' if many_writers else ''}{ASIDE}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)


def copy_sparse(source: OwnedFd, target: OwnedFd) -> None:
    """`target`, only a hole so far, has the content of `source`, and holes where that has some. Raises OSError.

    It grows to the size of `source`, and does not shrink: others may have mapped it.
    """
    if os.fstat(target.fileno()).st_size < (size := os.fstat(source.fileno()).st_size):
        os.truncate(target.fileno(), size)
    for start, end in _data(source.fileno()):
        os.lseek(target.fileno(), start, os.SEEK_SET)
        while start < end:
            sent = os.sendfile(target.fileno(), source.fileno(), start, end - start)
            if not sent:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            start += sent


def copy_without_zeros(source: OwnedFd, target: OwnedFd) -> None:
    """As `copy_sparse`, with holes for pages of zeros as well: a guest's kernel touches many and leaves them so."""
    os.truncate(target.fileno(), os.fstat(source.fileno()).st_size)
    for start, end in _data(source.fileno()):
        for offset in range(start, end, _PAGE_BYTES):
            page = os.pread(source.fileno(), _PAGE_BYTES, offset)
            if page != _ZEROS[: len(page)]:
                os.pwrite(target.fileno(), page, offset)


def _data(fd: int) -> Iterator[tuple[int, int]]:
    """The pieces that are no holes. Source: lseek(2)."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


_LOCK_PAUSE_S = 0.01
"""Seconds between two attempts."""


def open_directory(path: str) -> OwnedFd:
    """A descriptor to lock. Raises OSError."""
    return OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def lock_within(directory: OwnedFd, wait_s: float) -> bool:
    """The directory is locked until its descriptor is closed; False when others have the lock for so long. Blocking."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(directory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
