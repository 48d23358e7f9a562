"""Layers of an image as files of the host: EROFS file systems, some with dm-verity's hashes behind them. Pure."""

import re
import struct
from typing import Annotated

import msgspec

from pyshim.model.decoding import from_json
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RootfsMount

SUPERBLOCK_OFFSET_BYTES = 1024
SUPERBLOCK_BYTES = 128
VERITY_SUPERBLOCK_BYTES = 512
VERITY_OPTION = "X-containerd.dmverity="
"""Names the file with the root hash. Source: containerd 2.3's EROFS snapshotter, `dmverity_mode`."""
MAX_VERITY_BYTES = 64 * 1024
_EROFS_MAGIC = 0xE0F5E1E2
_VERITY = struct.Struct("<8sII16s32sIIQH6x256s")
"""Signature, version, hash type, UUID, algorithm, data and hash block size, data blocks, salt's size, salt.
Source: cryptsetup's lib/verity/verity.c."""
_VERITY_SIGNATURE = b"verity\0\0"
_ALGORITHM = re.compile(rb"([a-z0-9_-]+)\0*")


class LayerVerity(msgspec.Struct, frozen=True, kw_only=True):
    """The file that containerd's differ writes beside a layer."""

    root_hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{2,128}$")] = msgspec.field(name="roothash")
    hash_offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = msgspec.field(name="hashoffset")


def is_layer(mount: RootfsMount) -> bool:
    """True for an EROFS file; a block device is mounted without `loop`."""
    return mount.type == "erofs" and "loop" in mount.options


def verity_file(mount: RootfsMount) -> str | None:
    """The file with the layer's root hash; None for a layer without."""
    return next((word.removeprefix(VERITY_OPTION) for word in mount.options if word.startswith(VERITY_OPTION)), None)


def check_layer(path: str, superblock: bytes, size_bytes: int) -> None:
    """Raises FailedPrecondition if the file is no EROFS file system or lacks its end.

    `superblock` is what the file has at SUPERBLOCK_OFFSET_BYTES. Without the check the guest mounts a truncated layer,
    and a container finds out when it reads a file. Source: struct erofs_super_block (magic at byte 0, log2 of the
    block size at 12, number of blocks at 36).
    """
    if len(superblock) < SUPERBLOCK_BYTES or int.from_bytes(superblock[:4], "little") != _EROFS_MAGIC:
        raise FailedPrecondition(f"plug layer '{path}': not an EROFS file system")
    full_bytes = int.from_bytes(superblock[36:40], "little") << superblock[12]
    if size_bytes < full_bytes:
        raise FailedPrecondition(f"plug layer '{path}': truncated, {size_bytes} of {full_bytes} bytes")


def layer_verity(path: str, document: bytes) -> LayerVerity:
    """The layer's verity in the JSON of its file. Raises InvalidArgument naming the file."""
    return from_json(document, LayerVerity, lambda problem: InvalidArgument(f"read root hash '{path}': {problem}"))


def verity_options(path: str, verity: LayerVerity, superblock: bytes) -> tuple[str, ...]:
    """The agent's options for a layer that the guest's kernel verifies, in kata-agent's words.

    `superblock` is what the layer has at the offset of its hashes. Raises FailedPrecondition naming the layer.
    """
    if len(superblock) < VERITY_SUPERBLOCK_BYTES or not superblock.startswith(_VERITY_SIGNATURE):
        raise FailedPrecondition(f"plug layer '{path}': no dm-verity hashes at byte {verity.hash_offset_bytes}")
    _, _, hash_type, _, name, data_bytes, hash_bytes, _, salt_bytes, salt = _VERITY.unpack_from(superblock)
    if (algorithm := _ALGORITHM.fullmatch(name)) is None:
        raise FailedPrecondition(f"plug layer '{path}': its dm-verity hashes are of no known algorithm")
    values = {
        "roothash": verity.root_hash,
        "hashoffset": verity.hash_offset_bytes,
        "no-superblock": "false",
        "salt": salt[:salt_bytes].hex(),
        "blocksize": data_bytes,
        "hashsize": hash_bytes,
        "algorithm": algorithm[1].decode(),
        "hashtype": hash_type,
    }
    return ("X-kata.dmverity-enabled=true", *(f"X-kata.dmverity.{key}={value}" for key, value in values.items()))
