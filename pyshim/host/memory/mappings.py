"""What is mapped in a process. Source: proc(5), /proc/PID/maps; kernel Documentation/admin-guide/mm/pagemap.rst."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENTRY_BYTES = 8
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61


class Mapping(NamedTuple):
    start: int
    end: int
    permissions: str
    offset: int
    inode: int
    """Of the mapped file; 0 for memory that is no file's."""
    name: str


def mappings(pid: int | None = None) -> list[Mapping]:
    """All of a process's, by address; this one's without `pid`."""
    found = []
    with open(f"/proc/{pid or 'self'}/maps") as file:
        for line in file.read().splitlines():
            addresses, permissions, offset, _, inode, *name = line.split(maxsplit=5)
            start, _, end = addresses.partition("-")
            found.append(Mapping(int(start, 16), int(end, 16), permissions, int(offset, 16), int(inode), "".join(name)))
    return found


def written_to() -> list[Mapping]:
    """Every writable private mapping but the stack."""
    return [each for each in mappings() if each.permissions == "rw-p" and each.name != "[stack]"]


def own_pages(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and end of each run of pages that have been written to, by this process or before it was forked."""
    return _runs(start, end, lambda entry: entry & (_PRESENT | _SWAPPED) and not entry & _FILE)


def pages_of_files(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and end of each run of pages in memory that are a file's still, shared with whoever else has it."""
    return _runs(start, end, lambda entry: entry & _PRESENT and entry & _FILE)


def as_runs(pages: Iterable[int]) -> Iterator[int]:
    """Start and end, in turn, of each run of these pages."""
    end = -1
    for page in sorted(pages):
        if page != end:
            if end >= 0:
                yield end
            yield page
        end = page + PAGE_BYTES
    if end >= 0:
        yield end


def _runs(start: int, end: int, wanted: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        size = (end - start) // PAGE_BYTES * _ENTRY_BYTES
        entries = os.pread(file.fileno(), size, start // PAGE_BYTES * _ENTRY_BYTES)
    begin = at = start
    for (entry,) in struct.iter_unpack("=Q", entries):
        if not wanted(entry):
            if begin < at:
                yield begin, at
            begin = at + PAGE_BYTES
        at += PAGE_BYTES
    if begin < at:
        yield begin, at
