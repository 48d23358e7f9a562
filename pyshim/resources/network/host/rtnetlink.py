"""Messages of rtnetlink and their attributes, as bytes. Source: rtnetlink(7), netlink(7), linux/rtnetlink.h.

Import-light like `link_removal` and `link_search`, which are for `delete`.
"""

import struct
from collections.abc import Iterator

HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
IFINFO_BYTES = 16
"""Of a message about a link, before its attributes."""
IFLA_IFNAME = 3
RTM_DELLINK = 17


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and body of each message; what makes no sense ends them."""
    return _pieces(data, HEADER)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each attribute; what makes no sense ends them."""
    return _pieces(data, ATTRIBUTE)


def _pieces(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Both kinds begin with their length, header included, and what they are, and go on at a multiple of four."""
    offset = 0
    while offset + header.size <= len(data):
        length, kind = header.unpack_from(data, offset)[:2]
        if length < header.size:
            return
        yield kind, data[offset + header.size : offset + length]
        offset += (length + 3) & ~3
