"""Devices that the kernel's device mapper makes over a disk: encrypted, or checked while they are read.

Sources: the kernel's uapi/linux/dm-ioctl.h, admin-guide/device-mapper/dm-crypt.rst and verity.rst.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from fcntl import ioctl
from typing import NamedTuple

from guest.agent.children import Children
from guest.agent.errors import Internal, InvalidArgument, os_cause
from guest.agent.files import opened

SECTOR_BYTES = 512
_CONTROL = "/dev/mapper/control"
_VERSION = (4, 0, 0)
_HEADER = struct.Struct("=3IIIIiIIIQ128s129s7x")
"""struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name and
uuid."""
_TARGET = struct.Struct("=QQiI16s")
"""struct dm_target_spec: first sector, sectors, status, offset of the next, type."""
_CREATE, _REMOVE, _RESUME, _LOAD = 3, 4, 6, 9
_READ_ONLY, _DEFERRED = 1, 1 << 17
"""DM_READONLY_FLAG; DM_DEFERRED_REMOVE: a device in use goes with its last user."""


class Target(NamedTuple):
    """The one mapping of all `sectors` of a device."""

    type: str
    sectors: int
    parameters: str
    is_read_only: bool = False


async def map_device(children: Children, name: str, target: Target, modules: Sequence[str]) -> str:
    """The node of the new device `name`, once `modules` are loaded. Raises Internal with the reason."""
    await children.load_modules(*modules)
    try:
        return _map(name, target)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Internal(f"make device {name!r} of type {target.type!r}: {os_cause(error)}{where}") from error


def unmap_device(name: str) -> None:
    """The device is gone, or goes when the file system on it does. Raises OSError."""
    with opened(_CONTROL, os.O_RDWR) as control:
        _ask(control, _REMOVE, name, _DEFERRED)


def _map(name: str, target: Target) -> str:
    flags = _READ_ONLY if target.is_read_only else 0
    with opened(_CONTROL, os.O_RDWR) as control:
        device = _ask(control, _CREATE, name)
        try:
            _ask(control, _LOAD, name, flags, table(target))
            _ask(control, _RESUME, name, flags)
        except OSError:
            _ask(control, _REMOVE, name)
            raise
    return f"/dev/dm-{(device & 0xFF) | (device >> 12 & 0xFFF00)}"


def sectors_of(disk: str) -> int:
    with opened(disk, os.O_RDONLY) as fd:
        return os.lseek(fd, 0, os.SEEK_END) // SECTOR_BYTES


def table(target: Target) -> bytes:
    """The one target, as DM_TABLE_LOAD takes it."""
    text = target.parameters.encode() + b"\0"
    text += bytes(-len(text) % 8)
    return _TARGET.pack(0, target.sectors, 0, _TARGET.size + len(text), target.type.encode()) + text


def _ask(control: int, command: int, name: str, flags: int = 0, data: bytes = b"") -> int:
    """One ioctl about the device `name`; its device number."""
    size = _HEADER.size + len(data)
    head = _HEADER.pack(*_VERSION, size, _HEADER.size, 1 if data else 0, 0, flags, 0, 0, 0, name.encode(), b"")
    buffer = bytearray(head + data)
    ioctl(control, 3 << 30 | _HEADER.size << 16 | 0xFD << 8 | command, buffer)
    return int(_HEADER.unpack_from(buffer)[10])


# -- dm-crypt ----------------------------------------------------------------------------------------------------------
# The key is made here, given to the kernel and forgotten, so the data is lost with the VM and is never readable outside
# it.

_CRYPT_MODULES = ("dm_mod", "dm_crypt", "ecb", "xts")
_CRYPT_KEY_BYTES = 64
"""AES-256 in XTS mode has two keys."""


async def encrypted(children: Children, disk: str) -> str:
    """The node of a device that encrypts all writes to `disk` with a new key. Raises Internal with the reason."""
    try:
        target = crypt_target(sectors_of(disk), disk, os.urandom(_CRYPT_KEY_BYTES))
    except OSError as error:
        raise Internal(f"encrypt {disk!r}: {os_cause(error)}") from error
    return await map_device(children, f"crypt-{os.path.basename(disk)}", target, _CRYPT_MODULES)


def crypt_target(sectors: int, disk: str, key: bytes) -> Target:
    return Target(type="crypt", sectors=sectors, parameters=f"aes-xts-plain64 {key.hex()} 0 {disk} 0")


# -- dm-verity ---------------------------------------------------------------------------------------------------------
# Over a layer of an image: the kernel reads no block that does not belong to the root hash.

VERITY_MODULES = ("dm_mod", "dm_verity")
VERITY_PREFIX = "X-kata.dmverity"
"""With which the options begin, kata-agent's."""
_SUPERBLOCK_BYTES = 512
_VERITY_WORDS = {
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
_VERITY_DEFAULTS = {
    "blocksize": "4096",
    "hashsize": "4096",
    "algorithm": "sha256",
    "salt": "",
    "hashtype": "1",
    "no-superblock": "false",
}


def verity_target(words: Sequence[str], disk: str) -> Target:
    """The target that checks `disk`, whose hash tree is behind its data. InvalidArgument names a word that is wrong."""
    values = dict(_VERITY_DEFAULTS)
    for word in words:
        key, _, value = word.removeprefix(VERITY_PREFIX)[1:].partition("=")
        if key not in _VERITY_WORDS or re.fullmatch(_VERITY_WORDS[key], value) is None:
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
