"""The pages of a forked process, compared with those of the process it was forked from. Needs root.

Source: kernel Documentation/admin-guide/mm/pagemap.rst, the bits of /proc/PID/pagemap.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyshim.host.memory.baseline import NAME
from pyshim.host.memory.mappings import Mapping, mappings

PAGE = os.sysconf("SC_PAGE_SIZE")
KIB_PER_PAGE = PAGE // 1024
_PRESENT, _FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
_WORD = 8
_FEW_WORDS = 4
KINDS = ("unchanged", "few words", "rewritten", "new")
"""Of a private page: equal to the zygote's; other in at most 4 words of 8 bytes; in more; at an address of its own."""


@dataclass(slots=True)
class Private:
    """The private pages of a process, in KiB by kind and by place; `pages` are their addresses."""

    kinds: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    pages: set[int] = field(default_factory=set)


def private_of(pid: int, ancestor: int) -> Private:
    """What of `pid` no other process maps, compared with `ancestor`, which has what the fork began with."""
    theirs = {address for each in _mappings(ancestor) for address in range(each.start, each.end, PAGE)}
    found = Private()
    with open(f"/proc/{pid}/mem", "rb") as memory, open(f"/proc/{ancestor}/mem", "rb") as other:
        for address, place, is_private in _mapped(pid):
            if not is_private:
                continue
            found.pages.add(address)
            kind = "new"
            if address in theirs:
                kind = _difference(_page(memory.fileno(), address), _page(other.fileno(), address))
            found.kinds[kind] += KIB_PER_PAGE
            found.places[place] += KIB_PER_PAGE
    return found


def _mapped(pid: int) -> Iterator[tuple[int, str, bool]]:
    """Address, place and whether it is private, of every page that is present."""
    with open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for start, end, _, _, _, name in _mappings(pid):
            entries = os.pread(pagemap.fileno(), (end - start) // PAGE * 8, start // PAGE * 8)
            for number, (entry,) in enumerate(struct.iter_unpack("=Q", entries)):
                if entry & _PRESENT:
                    yield start + number * PAGE, _place(name), bool(entry & _EXCLUSIVE) and not entry & _FILE


def _mappings(pid: int) -> list[Mapping]:
    """All but the kernel's own."""
    return [each for each in mappings(pid) if not each.name.startswith("[v")]


def _place(name: str) -> str:
    if not name:
        return "Python's objects, threads"  # both are anonymous mappings
    if NAME in name:
        return "what the zygote had"
    if name.startswith("["):
        return {"[heap]": "C heap"}.get(name, name.strip("[]"))
    return "data of the interpreter" if "python3" in os.path.basename(name) else "data of libraries"


def _page(fd: int, address: int) -> bytes:
    return os.pread(fd, PAGE, address)


def _difference(ours: bytes, theirs: bytes) -> str:
    if ours == theirs:
        return "unchanged"
    words = sum(ours[at : at + _WORD] != theirs[at : at + _WORD] for at in range(0, PAGE, _WORD))
    return "few words" if words <= _FEW_WORDS else "rewritten"
