"""Writes the initramfs archive format: cpio "newc".

Source of the layout: kernel Documentation/driver-api/early-userspace/buffer-format.rst.
"""

import stat

from guest.image.tree import Entry, Tree

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"


def _member(name: str, entry: Entry, inode: int, mtime_s: int) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (
        inode,
        entry.mode,
        0,  # uid
        0,  # gid
        2 if stat.S_ISDIR(entry.mode) else 1,
        mtime_s,
        len(entry.data),
        0,  # major and minor of the device the file lies on
        0,
        *entry.device,
        len(encoded),
        0,  # checksum: unused by this magic
    )
    header = _MAGIC + b"".join(b"%08X" % field for field in fields) + encoded
    return _padded(header) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def cpio_archive(tree: Tree, mtime_s: int) -> bytes:
    """`tree` as an uncompressed archive; equal trees give equal bytes.

    No two members share an inode number, so the kernel never takes one for a hard link of another.
    """
    members = [_member(path, entry, inode, mtime_s) for inode, (path, entry) in enumerate(tree.items(), start=1)]
    members.append(_member(_TRAILER, Entry(0), 0, 0))
    return b"".join(members)
