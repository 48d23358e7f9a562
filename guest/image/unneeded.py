"""A program without a shared library that it names but never calls into here.

The dynamic loader opens, maps and relocates every library a program names, and what those name in turn, at each start.
Source of the layout: System V gABI, chapter 5; the version tables: the Linux Standard Base, "Symbol Versioning".
"""

import struct

from guest.image.elf import Section, sections, text_at
from guest.image.errors import BuildError

_SECTION_DYNAMIC, _SECTION_DYNAMIC_SYMBOLS = 6, 11
_SECTION_VERSIONS_NEEDED, _SECTION_SYMBOL_VERSIONS = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NULL, _DT_NEEDED, _DT_VERSIONS_NEEDED_COUNT = 0, 1, 0x6FFFFFFF
# of one library: form, how many versions, its name, where the first of them is and where the next record, from here
_RECORD = struct.Struct("<HHIII")
_FOLLOWING_AT = 12
_SYMBOL_BYTES, _SYMBOL_INFO_AT, _SYMBOL_SECTION_AT = 24, 4, 6
_WEAK = 2 << 4
_GLOBAL_VERSION = 1


def without_library(data: bytes, library: str, name: str) -> bytes:
    """The ELF file `name` with content `data`, no longer in need of `library`; nothing in it has moved.

    The functions of the library are weak now, and null: who calls one all the same dies of it. Raises BuildError when
    the file does not need `library`, or not by versioned symbols only.
    """
    file = bytearray(data)
    every = sections(data, name)
    table = {section.kind: section for section in every}
    try:
        dynamic, symbols = table[_SECTION_DYNAMIC], table[_SECTION_DYNAMIC_SYMBOLS]
        needed, versions = table[_SECTION_VERSIONS_NEEDED], table[_SECTION_SYMBOL_VERSIONS]
    except KeyError as exc:
        raise BuildError(f"take {library} out of {name}: it has no dynamic symbols with versions") from exc
    strings = every[dynamic.link].offset
    indices = _drop_versions(file, needed, strings, library, name)
    _drop_needed(file, dynamic, strings, library)
    for number in range(symbols.size // _SYMBOL_BYTES):
        version_at = versions.offset + 2 * number
        if struct.unpack_from("<H", file, version_at)[0] not in indices:
            continue
        symbol_at = symbols.offset + _SYMBOL_BYTES * number
        if struct.unpack_from("<H", file, symbol_at + _SYMBOL_SECTION_AT)[0] != 0:
            raise BuildError(f"take {library} out of {name}: symbol {number} has a place of its own in the file")
        file[symbol_at + _SYMBOL_INFO_AT] = _WEAK | file[symbol_at + _SYMBOL_INFO_AT] & 0xF
        struct.pack_into("<H", file, version_at, _GLOBAL_VERSION)
    return bytes(file)


def _drop_versions(file: bytearray, needed: Section, strings: int, library: str, name: str) -> frozenset[int]:
    """The indices of the library's versions, whose record is out of the chain."""
    at, before = needed.offset, None
    while True:
        _, count, file_name, first, following = _RECORD.unpack_from(file, at)
        if text_at(file, strings + file_name) == library:
            break
        if not following:
            raise BuildError(f"take {library} out of {name}: it needs no version of it")
        at, before = at + following, at
    indices, each = set(), at + first
    for _ in range(count):
        index, _, step = struct.unpack_from("<HII", file, each + 6)
        indices.add(index)
        each += step
    if before is not None:
        struct.pack_into("<I", file, before + _FOLLOWING_AT, at + following - before if following else 0)
    elif following:
        # The dynamic table names the place of the first record: the second one moves there, its versions stay.
        form, count, file_name, first, last = _RECORD.unpack_from(file, at + following)
        _RECORD.pack_into(file, at, form, count, file_name, first + following, last + following if last else 0)
    else:
        raise BuildError(f"take {library} out of {name}: it needs nothing else")
    return frozenset(indices)


def _drop_needed(file: bytearray, dynamic: Section, strings: int, library: str) -> None:
    """The dynamic table names the library no more, and one record of versions less."""
    kept = []
    for tag, value in struct.iter_unpack("<qQ", file[dynamic.offset : dynamic.offset + dynamic.size]):
        if tag != _DT_NEEDED or text_at(file, strings + value) != library:
            kept.append((tag, value - (tag == _DT_VERSIONS_NEEDED_COUNT)))
    kept.append((_DT_NULL, 0))
    for number, entry in enumerate(kept[: dynamic.size // 16]):
        struct.pack_into("<qQ", file, dynamic.offset + 16 * number, *entry)
