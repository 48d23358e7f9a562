"""dm-verity's hashes for a file, as containerd's differ appends them to a layer.

Format: the kernel's admin-guide/device-mapper/verity.rst, version 1 with a superblock.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

BLOCK_BYTES = 4096
_SALT = bytes(32)


def append_hashes(layer: Path) -> Path:
    """The layer has its hashes behind its data. Returns the file beside it that names the root hash."""
    data = layer.read_bytes()
    data += bytes(-len(data) % BLOCK_BYTES)
    count = len(data) // BLOCK_BYTES
    hashes = _level(data)
    levels: list[bytes] = []
    while len(hashes) > 1:
        blocks = b"".join(hashes)
        blocks += bytes(-len(blocks) % BLOCK_BYTES)
        levels.insert(0, blocks)
        hashes = _level(blocks)
    superblock = struct.pack(
        "<8sII16s32sIIQH6x", b"verity\0\0", 1, 1, bytes(16), b"sha256", BLOCK_BYTES, BLOCK_BYTES, count, len(_SALT)
    )
    layer.write_bytes(b"".join([data, (superblock + _SALT).ljust(BLOCK_BYTES, b"\0"), *levels]))
    described = layer.with_name(f"{layer.name}.dmverity")
    described.write_text(json.dumps({"roothash": hashes[0].hex(), "hashoffset": len(data)}))
    return described


def _level(blocks: bytes) -> list[bytes]:
    each = (blocks[at : at + BLOCK_BYTES] for at in range(0, len(blocks), BLOCK_BYTES))
    return [hashlib.sha256(_SALT + block).digest() for block in each]
