"""Unpacks the kernel inside a bzImage: QEMU starts it by its PVH entry, which skips real mode, decompression and
relocation.

Source of the offsets: kernel Documentation/x86/boot.rst, the real-mode kernel header, protocol 2.08 and later.
"""

import struct
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError

_SECTOR_BYTES = 512
_LZ4_LEGACY_MAGIC = b"\x02\x21\x4c\x18"
_ELF_MAGIC = b"\x7fELF"
_SIZE_TRAILER_BYTES = 4  # the build appends the uncompressed size to the payload


def payload(bzimage: bytes) -> bytes:
    """The compressed kernel in `bzimage`, without the size that follows it. Only LZ4 is known, which Debian uses."""
    try:
        (signature,) = struct.unpack_from("<4s", bzimage, 0x202)
        offset, length = struct.unpack_from("<II", bzimage, 0x248)
    except struct.error as exc:
        raise BuildError("read the kernel: shorter than a bzImage header") from exc
    if signature != b"HdrS":
        raise BuildError("read the kernel: not a bzImage")
    setup_sectors = bzimage[0x1F1] or 4
    start = (setup_sectors + 1) * _SECTOR_BYTES + offset
    compressed = bzimage[start : start + length - _SIZE_TRAILER_BYTES]
    if len(compressed) != length - _SIZE_TRAILER_BYTES:
        raise BuildError("read the kernel: the bzImage is cut short")
    if not compressed.startswith(_LZ4_LEGACY_MAGIC):
        raise BuildError("read the kernel: its payload is not LZ4")
    return compressed


def write_vmlinux(bzimage: bytes, target: Path) -> None:
    """Write the ELF kernel in `bzimage` to `target`."""
    compressed = target.with_suffix(".lz4")
    compressed.write_bytes(payload(bzimage))
    run(["lz4", "-d", "-q", compressed, target])
    compressed.unlink()
    with target.open("rb") as file:
        if file.read(4) != _ELF_MAGIC:
            raise BuildError("unpack the kernel: what came out is not an ELF file")
