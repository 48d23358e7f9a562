"""A kept process as bytes: a line of JSON, padded to `HEADER_BYTES`, then the pages that were written to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER_BYTES = 1 << 16


class Mapping(NamedTuple):
    """A line of /proc/PID/maps. `data` is its content, if any page is the process's own; else None: as the file `path`
    is from `offset` on, or zero where `path` is no file's.
    """

    start: int
    end: int
    protection: int  # PROT_READ 1, PROT_WRITE 2, PROT_EXEC 4
    offset: int
    path: str
    data: bytes | None


class Process(NamedTuple):
    """All that a stopped process of one thread is, but for what the kernel keeps. Registers have ptrace's names."""

    registers: dict[str, int]
    mappings: tuple[Mapping, ...]

    def pieces(self) -> Iterator[bytes]:
        """What `parse` reads, piece by piece."""
        rows = [(*mapping[:-1], mapping.data is not None) for mapping in self.mappings]
        header = json.dumps({"registers": self.registers, "mappings": rows}).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(f"write snapshot: {len(rows)} mappings do not fit into the header")
        yield header.ljust(HEADER_BYTES)
        for mapping in self.mappings:
            yield mapping.data or b""


def parse(disk: bytes) -> Process:
    """The process that `disk` begins with. Raises ValueError when there is none, or only a part."""
    header = json.loads(disk[:HEADER_BYTES].rstrip(b"\0 "))
    at = HEADER_BYTES
    mappings = []
    for start, end, protection, offset, path, has_data in header["mappings"]:
        data = None
        if has_data:
            data = disk[at : at + end - start]
            at += end - start
        mappings.append(Mapping(start, end, protection, offset, path, data))
    if at > len(disk):
        raise ValueError(f"read snapshot: {at} bytes long, the disk only {len(disk)}")
    return Process(header["registers"], tuple(mappings))
