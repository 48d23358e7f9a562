"""dm-verity over a layer of an image: the kernel reads no block that does not belong to the root hash.

Option words are kata-agent's (`X-kata.dmverity...`). Source: the kernel's admin-guide/device-mapper/verity.rst.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from guest.agent.errors import InvalidArgument
from guest.agent.storage.device_mapper import SECTOR_BYTES, Target

MODULES = ("dm_mod", "dm_verity")
PREFIX = "X-kata.dmverity"
_SUPERBLOCK_BYTES = 512
_WORDS = {
    "enabled": r"true",
    "roothash": r"[0-9a-f]{40,128}",
    "hashoffset": r"[1-9]\d{0,17}",
    "blocksize": r"512|1024|2048|4096",
    "hashsize": r"512|1024|2048|4096",
    "algorithm": r"sha1|sha256|sha512",
    "salt": r"([0-9a-f]{2}){0,256}",
    "hashtype": r"[01]",
    "no-superblock": r"true|false",
}
_DEFAULTS = {
    "blocksize": "4096",
    "hashsize": "4096",
    "algorithm": "sha256",
    "salt": "",
    "hashtype": "1",
    "no-superblock": "false",
}


def verity_target(words: Sequence[str], disk: str) -> Target:
    """The target that checks `disk`, whose hash tree is behind its data. InvalidArgument names a word that is wrong."""
    values = dict(_DEFAULTS)
    for word in words:
        key, _, value = word.removeprefix(PREFIX)[1:].partition("=")
        if key not in _WORDS or re.fullmatch(_WORDS[key], value) is None:
            raise InvalidArgument(f"verify {disk!r}: option {word[:200]!r} is not understood")
        values[key] = value
    if not {"roothash", "hashoffset"} <= values.keys():
        raise InvalidArgument(f"verify {disk!r}: no root hash or no offset of the hashes")
    offset, data_bytes, hash_bytes = (int(values[key]) for key in ("hashoffset", "blocksize", "hashsize"))
    if offset % data_bytes or offset % hash_bytes:
        raise InvalidArgument(f"verify {disk!r}: hash offset {offset} is not a multiple of the block sizes")
    superblock = 0 if values["no-superblock"] == "true" else -(-_SUPERBLOCK_BYTES // hash_bytes)
    sizes = f"{data_bytes} {hash_bytes} {offset // data_bytes} {offset // hash_bytes + superblock}"
    hashes = f"{values['algorithm']} {values['roothash']} {values['salt'] or '-'}"
    return Target(
        type="verity",
        sectors=offset // SECTOR_BYTES,
        parameters=f"{values['hashtype']} {disk} {disk} {sizes} {hashes}",
        is_read_only=True,
    )
