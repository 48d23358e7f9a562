"""A kept process as bytes: a line of JSON, padded to `HEADER_BYTES`, then the pages that were written to."""

from __future__ import annotations

import json
import zlib
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
        checksum = 0
        for mapping in self.mappings:
            checksum = zlib.crc32(mapping.data or b"", checksum)
        fields = {"registers": self.registers, "mappings": rows, "checksum": checksum}
        header = json.dumps(fields).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(f"write snapshot: {len(rows)} mappings do not fit into the header")
        yield header.ljust(HEADER_BYTES)
        for mapping in self.mappings:
            yield mapping.data or b""


def parse(disk: bytes) -> Process:
    """The process that `disk` begins with. Raises ValueError when there is none, or only a part: a disk has its length
    from the start, so what was never written to it reads as zeros.
    """
    header = json.loads(disk[:HEADER_BYTES].rstrip(b"\0 "))
    at = HEADER_BYTES
    checksum = 0
    mappings = []
    for start, end, protection, offset, path, has_data in header["mappings"]:
        data = None
        if has_data:
            data = disk[at : at + end - start]
            checksum = zlib.crc32(data, checksum)
            at += end - start
        mappings.append(Mapping(start, end, protection, offset, path, data))
    if at > len(disk):
        raise ValueError(f"read snapshot: {at} bytes long, the disk only {len(disk)}")
    if checksum != header["checksum"]:
        raise ValueError("read snapshot: the pages on the disk are not those of the process")
    return Process(header["registers"], tuple(mappings))
