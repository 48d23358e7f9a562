"""Reads the few facts the build needs from ELF files: needed libraries, and the .modinfo section of kernel modules.

Source of the layout: System V gABI, chapters 4 (object files) and 5 (dynamic linking); little-endian 64 bit only.
"""

import struct
from typing import NamedTuple

from guest.image.errors import BuildError

_SECTION_DYNAMIC = 6
_DT_NULL, _DT_NEEDED = 0, 1


class Section(NamedTuple):
    """One section header, reduced to what is read here."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


def is_elf(data: bytes) -> bool:
    """True when `data` is a little-endian 64-bit ELF file."""
    return data[:6] == b"\x7fELF\x02\x01"


def text_at(data: bytes | bytearray, offset: int) -> str:
    """The text at `offset`, up to its NUL."""
    end = data.index(b"\0", offset)
    return data[offset:end].decode()


def sections(data: bytes, name: str) -> list[Section]:
    """The section table of the file `name`."""
    if not is_elf(data):
        raise BuildError(f"read {name}: not a little-endian 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
        raw = []
        for index in range(count):
            name_offset, kind = struct.unpack_from("<II", data, table + index * entry_size)
            offset, size, link = struct.unpack_from("<QQI", data, table + index * entry_size + 0x18)
            raw.append((name_offset, kind, offset, size, link))
        names_offset = raw[names_index][2]
        return [Section(text_at(data, names_offset + start), *rest) for start, *rest in raw]
    except (struct.error, IndexError, ValueError) as exc:
        raise BuildError(f"read {name}: broken ELF section table: {exc}") from exc


def needed_libraries(data: bytes, name: str) -> tuple[str, ...]:
    """The DT_NEEDED names of the file, in its own order; empty for a static one."""
    table = sections(data, name)
    for section in table:
        if section.kind != _SECTION_DYNAMIC:
            continue
        strings = table[section.link].offset
        needed = []
        for tag, value in struct.iter_unpack("<qQ", data[section.offset : section.offset + section.size]):
            if tag == _DT_NULL:
                break
            if tag == _DT_NEEDED:
                needed.append(text_at(data, strings + value))
        return tuple(needed)
    return ()


def module_info(data: bytes, name: str) -> dict[str, list[str]]:
    """The key=value pairs of a kernel module, e.g. `alias` and `depends`, each key with all its values in order."""
    for section in sections(data, name):
        if section.name == ".modinfo":
            info: dict[str, list[str]] = {}
            for pair in data[section.offset : section.offset + section.size].split(b"\0"):
                key, equals, value = pair.decode().partition("=")
                if equals:
                    info.setdefault(key, []).append(value)
            return info
    raise BuildError(f"read {name}: no .modinfo section, so not a kernel module")
