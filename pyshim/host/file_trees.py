"""Trees of host files as they are copied into a guest: listed whole, read in pieces, never out of their root.

Names are resolved beneath the root and links are never followed: a pod that can write to a volume must not make the
shim read another file. The root itself is the kubelet's or the operator's choice and may be a link.
"""

import os
import stat
from collections.abc import Iterator

from pyshim.host.syscalls import openat2
from pyshim.model.copies import TreeEntry
from pyshim.model.errors import FailedPrecondition, ResourceExhausted

MAX_ENTRIES = 20_000
MAX_TREE_BYTES = 512 << 20
"""What a copy may hold of the guest's memory: a volume above it is no configuration and wants another way in."""
MAX_DEPTH = 64
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08
"""Source: openat2(2)."""


def list_tree(root: str) -> tuple[TreeEntry, ...]:
    """The root first, each directory before what is in it. Raises OSError, ResourceExhausted for a tree too large.

    Sockets, devices and FIFOs are left out, as is what goes away meanwhile.
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
    """What is in the directory `parent` (an O_PATH descriptor), in the order of names."""
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
        return openat2(root_fd, path, flags, resolve=_RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    finally:
        os.close(root_fd)
