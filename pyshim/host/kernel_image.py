"""What the files that a guest boots from say of themselves."""

import os
import re
import stat
from typing import BinaryIO

from pyshim.model.architecture import ARCHITECTURES

_SIGNATURE_AT, _SIGNATURE, _VERSION_AT, _HEADER_BYTES = 0x202, b"HdrS", 0x20E, 0x210
"""Of a bzImage. `_VERSION_AT` has the place of its version text, counted from 0x200. Source: kernel
Documentation/arch/x86/boot.rst, the real-mode kernel header."""
_BANNER = re.compile(rb"Linux version (\d\S*)\s")
"""In an ELF kernel: what it prints first, and `/proc/version` has."""
_RELEASE = re.compile(rb"\d\S*")
_TEXT_BYTES = 256
_PIECE_BYTES = 1 << 20


def kernel_release(path: str) -> str:
    """The release of the kernel in a bzImage or an uncompressed file, such as `6.12.57-amd64`; empty without one.

    Raises OSError.
    """
    with open(path, "rb") as file:
        piece = file.read(_HEADER_BYTES)
        if piece[_SIGNATURE_AT:].startswith(_SIGNATURE):
            file.seek(0x200 + int.from_bytes(piece[_VERSION_AT:], "little"))
            found = _RELEASE.match(file.read(_TEXT_BYTES))
            return found[0].decode("ascii", "replace") if found else ""
        while True:
            more = file.read(_PIECE_BYTES)
            piece = piece[-_TEXT_BYTES:] + more  # a banner between two pieces is found in the second
            if found := _BANNER.search(piece):
                return found[1].decode("ascii", "replace")
            if not more:
                return ""


_ELF = b"\x7fELF\x02\x01"
_ELF_MACHINE = slice(18, 20)
_CPIO, _CPIO_HEADER_BYTES = b"070701", 110
"""Source: kernel Documentation/driver-api/early-userspace/buffer-format.rst."""
_MAX_ENTRIES = 64


def boot_file_architecture(path: str) -> str:
    """The architecture, as `uname -m` says it, of a kernel, or of the programs in an uncompressed initramfs.

    Empty if the file does not say. Raises OSError; a file that is not a regular one says nothing.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return ""
        head = file.read(_HEADER_BYTES)
        if head.startswith(_CPIO):
            head = _first_program(file)
    for each in ARCHITECTURES.values():
        offset, magic = each.kernel_magic
        of_elf = head.startswith(_ELF) and int.from_bytes(head[_ELF_MACHINE], "little") == each.elf_machine
        if of_elf or head[offset:].startswith(magic):
            return each.name
    return ""


def _first_program(file: BinaryIO) -> bytes:
    """The head of the first ELF file among the first entries; empty without one."""
    at = 0
    for _ in range(_MAX_ENTRIES):
        file.seek(at)
        header = file.read(_CPIO_HEADER_BYTES)
        try:
            size_bytes, name_bytes = int(header[54:62], 16), int(header[94:102], 16)
        except ValueError:
            break
        content_at = at + _aligned(_CPIO_HEADER_BYTES + name_bytes)
        file.seek(content_at)
        head = file.read(_HEADER_BYTES)
        if size_bytes > len(_ELF) and head.startswith(_ELF):
            return head
        at = content_at + _aligned(size_bytes)
    return b""


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
