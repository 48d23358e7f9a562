"""Unpacks the kernel inside a bzImage: QEMU starts it by its PVH entry, which skips real mode, decompression and
relocation. arm64's Image is not packed.

Source of the offsets: kernel Documentation/x86/boot.rst, the real-mode kernel header, protocol 2.08 and later.
"""

import struct
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError
from guest.image.toolchain import Toolchain

_SECTOR_BYTES = 512
_MAGIC = {b"\x02\x21\x4c\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd"}
"""The compressions that Debian's kernels have: LZ4 in its old format until Debian 12, Zstandard since."""
_ELF_MAGIC = b"\x7fELF"
_IMAGE_MAGIC = b"ARMd"  # at 0x38; Documentation/arm64/booting.rst
_SIZE_TRAILER_BYTES = 4  # the build appends the uncompressed size to the payload


def payload(bzimage: bytes) -> tuple[str, bytes]:
    """The name of the compression, and the compressed kernel in `bzimage` without the size that follows it."""
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
    if compressed[:4] not in _MAGIC:
        raise BuildError("read the kernel: its payload is neither LZ4 nor Zstandard")
    return _MAGIC[compressed[:4]], compressed


def write_vmlinux(bzimage: bytes, target: Path, tools: Toolchain) -> None:
    """Write the ELF kernel in `bzimage`, or the Image that it is, to `target`."""
    if bzimage[0x38:0x3C] == _IMAGE_MAGIC:
        target.write_bytes(bzimage)
        return
    program, content = payload(bzimage)
    compressed = target.with_suffix(".compressed")
    compressed.write_bytes(content)
    to = ("-o",) if program == "zstd" else ()
    run([*tools.argv(program), "-d", "-q", compressed, *to, target])
    compressed.unlink()
    with target.open("rb") as file:
        if file.read(4) != _ELF_MAGIC:
            raise BuildError("unpack the kernel: what came out is not an ELF file")
