"""Files that are copied into the guest: by calls of the shim, or from the share because they are watched.

inotify does not work across virtio-fs, so the storage driver watchable-bind makes an up-to-date copy of a directory or
file of the share. The target is a bind mount of the copy. A changed file is written beside the old one and renamed over
it, so a reader sees either the old or the new. Symlinks come after the files to which they point, and Kubernetes'
`..data`, which readers watch, last. Then files that have vanished from the source are removed. So a volume's update is
as atomic in the guest as on the host. A source that is a single file is rewritten in place: after a rename the bind
mount would still show the old one. Limits and interval are kata-agent's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from contextlib import suppress

from protos.agent.agent_pb2 import CopyFileRequest

from guest.agent import mounts
from guest.agent.errors import InvalidArgument, os_cause
from guest.agent.files import opened, remove_tree
from guest.agent.syscalls import open_beneath

log = logging.getLogger(__name__)

SHARED = "/run/kata-containers/shared/containers"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_FILE_BYTES = 1 << 40


# -- CopyFile ----------------------------------------------------------------------------------------------------------


def copy_file(request: CopyFileRequest, shared: str = SHARED) -> None:
    """One CopyFile call: a directory, a symlink, or a chunk of a file beneath `shared`.

    A file gets its name when its last chunk has arrived, and replaces what was there; until then it is `.NAME.part`.
    Missing parents are made with `dir_mode`. Symlinks in `shared` cannot lead out of it.
    InvalidArgument names a path that leads out.
    """
    path = request.path
    relative = os.path.relpath(path, shared) if path.startswith(shared.rstrip("/") + "/") else ".."
    if relative in (".", "..") or relative.startswith("../") or ".." in path.split("/") or "\0" in path:
        raise InvalidArgument(f"copy file {path!r}: not a path beneath {shared!r}")
    if request.offset < 0 or not 0 <= request.file_size <= _MAX_FILE_BYTES:
        raise InvalidArgument(f"copy file {path!r}: offset {request.offset}, size {request.file_size}")
    os.makedirs(shared, exist_ok=True)
    *parents, name = relative.split("/")
    try:
        with opened(shared, os.O_PATH | os.O_DIRECTORY) as root:
            parent = _make_parents(root, parents, request)
            try:
                _copy_into(parent, name, request)
            finally:
                os.close(parent)
    except OSError as error:
        raise InvalidArgument(f"copy file {path!r}: {os_cause(error)}") from error


def _make_parents(root: int, parents: list[str], request: CopyFileRequest) -> int:
    current = os.open(".", _DIR_FLAGS | os.O_CLOEXEC, dir_fd=root)
    walked = ""
    for depth, part in enumerate(parents):
        walked = f"{walked}/{part}" if walked else part
        try:
            os.mkdir(part, request.dir_mode & 0o777, dir_fd=current)
            made = True
        except FileExistsError:
            made = False
        except OSError:
            os.close(current)
            raise
        os.close(current)
        # Opened from the root each time: a symlink on the way is followed if it stays inside.
        current = open_beneath(root, walked, os.O_RDONLY | os.O_DIRECTORY)
        if made or depth == len(parents) - 1:
            os.fchown(current, request.uid, request.gid)
    return current


def _copy_into(parent: int, name: str, request: CopyFileRequest) -> None:
    kind = stat.S_IFMT(request.file_mode)
    if kind == stat.S_IFDIR:
        _copy_directory(parent, name, request)
        return
    if kind == stat.S_IFLNK:
        # Made beside the old one and renamed over it, so that readers never find the link missing.
        part = f".{name}.part"[:255]
        _remove_at(parent, part)
        os.symlink(request.data, os.fsencode(part), dir_fd=parent)
        os.chown(part, request.uid, request.gid, dir_fd=parent, follow_symlinks=False)
        _replace(parent, part, name)
        return
    if kind not in (0, stat.S_IFREG):
        raise InvalidArgument(
            f"copy file {request.path!r}: mode {request.file_mode:#o} is no file, directory or symlink"
        )
    _copy_chunk(parent, name, request)


def _copy_directory(parent: int, name: str, request: CopyFileRequest) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
    with suppress(FileExistsError):  # its content is kept
        os.mkdir(name, 0o700, dir_fd=parent)
    with opened(name, _DIR_FLAGS, dir_fd=parent) as fd:
        os.fchown(fd, request.uid, request.gid)
        os.fchmod(fd, request.file_mode & 0o7777)


def _copy_chunk(parent: int, name: str, request: CopyFileRequest) -> None:
    if request.offset + len(request.data) > request.file_size:
        raise InvalidArgument(
            f"copy file {request.path!r}: chunk ends after the file's size of {request.file_size} bytes"
        )
    part = f".{name}.part"[:255]
    fresh = request.offset == 0
    if fresh:
        _remove_at(parent, part)
    flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if fresh else 0)
    with opened(part, flags, dir_fd=parent) as fd:
        data, offset = memoryview(request.data), request.offset
        while data:
            count = os.pwrite(fd, data, offset)
            data, offset = data[count:], offset + count
        if offset < request.file_size:
            return
        os.fchown(fd, request.uid, request.gid)
        os.fchmod(fd, request.file_mode & 0o7777)
    _replace(parent, part, name)


def _replace(parent: int, part: str, name: str) -> None:
    try:
        os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
    except IsADirectoryError:
        _remove_at(parent, name)
        os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)


def _remove_at(parent: int, name: str) -> None:
    remove_tree(f"/proc/self/fd/{parent}/{name}")


# -- watchable-bind ----------------------------------------------------------------------------------------------------

WATCHABLE = "/run/kata-containers/shared/containers/watchable"
"""Where kata-agent's hosts want watched volumes: a directory of the share, read-only for the guest."""
_COPIES = "/run/kata-containers/watchable"
# kata-agent's interval in seconds, and its limits of what is copied: files, and bytes of all of them.
_EVERY_S = 2.0
_MAX_ENTRIES = 16
_MAX_BYTES = 1 << 20
# For a source that has grown since it was mounted. A mount can no longer replace the copy, so it is copied up to the
# size that Kubernetes allows for a ConfigMap.
_MAX_ENTRIES_LATER = 16_384
_MAX_BYTES_LATER = 4 << 20
_LAST = "..data"


class TooBig(Exception):
    """The source exceeds the limits."""


class Watches:
    """The volumes of the sandbox that are watched."""

    def __init__(self) -> None:
        self._watches: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """The copy, and the task that updates it, by target."""

    def start(self, source: str, target: str) -> None:
        """`target` shows a copy of `source` that follows it. A source above the limits is bind mounted instead."""
        if not source.startswith("/"):
            raise InvalidArgument(f"watch {source!r}: not an absolute path")
        _make_room(target)
        os.makedirs(_COPIES, mode=0o700, exist_ok=True)
        copy = f"{_COPIES}/{len(self._watches)}-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            seen = synchronize(source, copy, {})
        except TooBig as error:
            log.info("too big to watch, bind mounted", extra={"source": source, "cause": error})
            remove_tree(copy)
            mounts.make_target(source, target, "bind")
            mounts.mount(source, target, "bind", ["rbind"])
            return
        mounts.make_target(copy, target, "bind")
        mounts.mount(copy, target, "bind", ["bind"])
        task = asyncio.create_task(_follow(source, copy, seen), name=f"watch {source}")
        self._watches[target] = copy, task

    def stop(self, target: str) -> None:
        """The copy is no longer updated, and is unmounted and removed."""
        if target in self._watches:
            copy, task = self._watches.pop(target)
            task.cancel()
            mounts.unmount(target)
            remove_tree(copy)


def _make_room(target: str) -> None:
    """A target below WATCHABLE can be made: the directory is the guest's own tmpfs, as with kata-agent."""
    if target.startswith(f"{WATCHABLE}/") and mounts.mounted_type(WATCHABLE) != "tmpfs":
        os.makedirs(WATCHABLE, exist_ok=True)
        mounts.mount("tmpfs", WATCHABLE, "tmpfs", ["nosuid", "nodev", "mode=755"])


async def _follow(source: str, copy: str, seen: dict[str, tuple[int, ...]]) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            seen = synchronize(source, copy, seen, later=True)
        except (OSError, TooBig) as error:
            # The host may be in the middle of an update: the next round sees its end.
            log.debug("not synchronized", extra={"source": source, "error": error})


def synchronize(
    source: str, copy: str, seen: dict[str, tuple[int, ...]], *, later: bool = False
) -> dict[str, tuple[int, ...]]:
    """`copy` is like `source`. `seen` is the last call's result: entries that have not changed since are not touched.

    Raises TooBig before anything is changed, OSError when the source changes meanwhile.
    """
    limits = (_MAX_ENTRIES_LATER, _MAX_BYTES_LATER) if later else (_MAX_ENTRIES, _MAX_BYTES)
    found = _scan(source, *limits)
    changed = {name for name, entry in found.items() if seen.get(name) != entry}
    if changed or len(found) != len(seen):
        for name in sorted(changed, key=lambda name: _order(name, found[name][0])):
            _copy_entry(_below(source, name), _below(copy, name), name)
        for name in sorted(set(seen) - set(found), reverse=True):
            remove_tree(_below(copy, name))
    return found


def _below(root: str, name: str) -> str:
    return os.path.join(root, name) if name else root


def _order(name: str, mode: int) -> tuple[int, str]:
    """Directories, parents first; files; symlinks; `..data`."""
    if stat.S_ISLNK(mode):
        return (3 if name == _LAST else 2, name)
    return (0 if stat.S_ISDIR(mode) else 1, name)


def _scan(root: str, max_entries: int, max_bytes: int) -> dict[str, tuple[int, ...]]:
    """Relative path ("" for the root) -> mode, owner, size, time and inode of everything that is copied."""
    found: dict[str, tuple[int, ...]] = {}
    waiting, files, size = [""], 0, 0
    while waiting:
        name = waiting.pop()
        path = _below(root, name)
        entry = os.stat(path) if not name else os.lstat(path)
        if stat.S_ISDIR(entry.st_mode):
            # A directory's time changes with its entries, which are compared anyway.
            found[name] = (entry.st_mode, entry.st_uid, entry.st_gid)
            waiting += [os.path.join(name, child) for child in os.listdir(path)]
        elif stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode):
            found[name] = (entry.st_mode, entry.st_uid, entry.st_gid, entry.st_size, entry.st_mtime_ns, entry.st_ino)
            files, size = files + 1, size + entry.st_size
        if files > max_entries or len(found) > 4 * max_entries or size > max_bytes:
            raise TooBig(f"more than {max_entries} files or {max_bytes} bytes")
    return found


def _copy_entry(source: str, copy: str, name: str) -> None:
    entry = os.lstat(source) if name else os.stat(source)
    if stat.S_ISDIR(entry.st_mode):
        if not os.path.isdir(copy) or os.path.islink(copy):
            remove_tree(copy)
            os.mkdir(copy, 0o700)
        os.chown(copy, entry.st_uid, entry.st_gid)
        os.chmod(copy, stat.S_IMODE(entry.st_mode))
        return
    part = f"{os.path.dirname(copy)}/.{os.path.basename(copy)}.part"[:4095] if name else copy
    if name:
        remove_tree(part)
    if stat.S_ISLNK(entry.st_mode):
        os.symlink(os.readlink(source), part)
    else:
        with open(source, "rb") as old, open(part, "wb") as new:
            new.write(old.read(_MAX_BYTES_LATER + 1))
            os.fchmod(new.fileno(), stat.S_IMODE(entry.st_mode))
    os.chown(part, entry.st_uid, entry.st_gid, follow_symlinks=False)
    if name:
        if os.path.isdir(copy) and not os.path.islink(copy):
            remove_tree(copy)
        os.rename(part, copy)
