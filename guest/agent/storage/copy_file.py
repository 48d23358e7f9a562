"""Files the shim copies into the guest (CopyFile)."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from protos.agent.agent_pb2 import CopyFileRequest

from guest.agent.errors import InvalidArgument, os_cause
from guest.agent.files import opened, remove_tree
from guest.agent.syscalls import open_beneath

SHARED = "/run/kata-containers/shared/containers"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_FILE_BYTES = 1 << 40


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
