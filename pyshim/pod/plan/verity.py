"""dm-verity of the guest's root disk, by the kernel's parameter that sets it up before the root is mounted. Pure."""

import re
from typing import NamedTuple

from pyshim.model.errors import InvalidArgument

_SECTOR_BYTES = 512
_MAX_SECTORS = 1 << 63


class VerityParams(NamedTuple):
    """The values of Kata's kernel_verity_params, in its order and under its names."""

    root_hash: str
    salt: str
    data_blocks: int
    data_block_size: int
    hash_block_size: int


def read_verity(text: str, action: str) -> VerityParams:
    """The values of `root_hash=..,salt=..,data_blocks=..,data_block_size=..,hash_block_size=..`, in any order.

    Raises InvalidArgument, which begins with `action`, naming what is missing or wrong: a kernel that gets it wrong
    only says that it finds no root.
    """
    try:
        return _parsed(text)
    except ValueError as exc:
        raise InvalidArgument(f"{action}: {exc}") from exc


def root_device(verity: VerityParams, *, data: str, hashes: str) -> str:
    """`dm-mod.create=...`: makes /dev/dm-0 of the devices `data` and `hashes`.

    Source: the kernel's admin-guide/device-mapper/dm-init.rst and verity.rst.
    """
    sectors = verity.data_block_size // _SECTOR_BYTES * verity.data_blocks
    return (
        f'dm-mod.create="dm-verity,,,ro,0 {sectors} verity 1 {data} {hashes} {verity.data_block_size} '
        f'{verity.hash_block_size} {verity.data_blocks} 0 sha256 {verity.root_hash} {verity.salt}"'
    )


def _parsed(text: str) -> VerityParams:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in VerityParams._fields:
            raise ValueError(f"{part.strip()[:100]!r} is not one of {', '.join(VerityParams._fields)} with a value")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    for key in VerityParams._fields:
        if key not in values:
            raise ValueError(f"{key} is missing")
    verity = VerityParams(
        root_hash=_hexadecimal("root_hash", values),
        salt=_hexadecimal("salt", values),
        data_blocks=_number("data_blocks", values),
        data_block_size=_block_bytes("data_block_size", values),
        hash_block_size=_block_bytes("hash_block_size", values),
    )
    if verity.data_block_size // _SECTOR_BYTES * verity.data_blocks >= _MAX_SECTORS:
        raise ValueError(f"{verity.data_blocks} blocks of {verity.data_block_size} bytes do not make a disk")
    return verity


def _hexadecimal(key: str, values: dict[str, str]) -> str:
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2}){1,256}", values[key]):
        raise ValueError(f"{key} = {values[key][:100]!r} is not hexadecimal")
    return values[key]


def _number(key: str, values: dict[str, str]) -> int:
    text = values[key]
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise ValueError(f"{key} = {text[:100]!r} is not a number above 0")
    return int(text)


def _block_bytes(key: str, values: dict[str, str]) -> int:
    number = _number(key, values)
    if number % _SECTOR_BYTES:
        raise ValueError(f"{key} = {number} is not a multiple of {_SECTOR_BYTES}")
    return number
