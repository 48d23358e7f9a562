"""dm-verity of the guest's root disk, as the kernel's own parameter sets it up before the root is mounted."""

import re

from pyshim.model.errors import InvalidArgument

_KEYS = ("root_hash", "salt", "data_blocks", "data_block_size", "hash_block_size")
_READ = "read kernel_verity_params: "
_SECTOR_BYTES = 512
_MAX_SECTORS = 1 << 63


def root_device(text: str, *, data: str, hashes: str) -> str:
    """`dm-mod.create=...` for `text`: root_hash=..,salt=..,data_blocks=..,data_block_size=..,hash_block_size=..

    Raises InvalidArgument naming what is missing or wrong: a kernel that gets it wrong only says it finds no root.
    Source: the kernel's admin-guide/device-mapper/dm-init.rst and verity.rst.
    """
    values, numbers = _checked(text)
    blocks, block_bytes = numbers["data_blocks"], numbers["data_block_size"]
    sectors = block_bytes // _SECTOR_BYTES * blocks
    return (
        f'dm-mod.create="dm-verity,,,ro,0 {sectors} verity 1 {data} {hashes} {block_bytes} '
        f'{numbers["hash_block_size"]} {blocks} 0 sha256 {values["root_hash"]} {values["salt"]}"'
    )


def check_verity(text: str, where: str) -> None:
    """Raises InvalidArgument naming `where` and what is missing or wrong in `text`, which the guest reads itself."""
    try:
        _checked(text)
    except InvalidArgument as exc:
        raise InvalidArgument(f"read verity_params in {where}: {str(exc).removeprefix(_READ)}") from exc


def _checked(text: str) -> tuple[dict[str, str], dict[str, int]]:
    values = _values(text)
    numbers = {key: _number(key, values[key]) for key in _KEYS[2:]}
    for key in _KEYS[3:]:
        if numbers[key] % _SECTOR_BYTES:
            raise _wrong(f"{key} = {numbers[key]} is not a multiple of {_SECTOR_BYTES}")
    blocks, block_bytes = numbers["data_blocks"], numbers["data_block_size"]
    if block_bytes // _SECTOR_BYTES * blocks >= _MAX_SECTORS:
        raise _wrong(f"{blocks} blocks of {block_bytes} bytes do not make a disk")
    return values, numbers


def _values(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in _KEYS:
            raise _wrong(f"{part.strip()[:100]!r} is not one of {', '.join(_KEYS)} with a value")
        if key in values:
            raise _wrong(f"{key} is given twice")
        values[key] = value
    for key in _KEYS:
        if key not in values:
            raise _wrong(f"{key} is missing")
    for key in _KEYS[:2]:
        if not re.fullmatch(r"(?:[0-9a-fA-F]{2}){1,256}", values[key]):
            raise _wrong(f"{key} = {values[key][:100]!r} is not hexadecimal")
    return values


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise _wrong(f"{key} = {text[:100]!r} is not a number above 0")
    return int(text)


def _wrong(text: str) -> InvalidArgument:
    return InvalidArgument(f"{_READ}{text}")
