"""rtnetlink: messages, attributes, and a blocking socket, as the kernel answers before send returns.

Sources: rtnetlink(7), netlink(7), linux/rtnetlink.h, linux/if_link.h, linux/neighbour.h.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from struct import Struct
from typing import TypeAlias

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_REPLACE, NLM_F_CREATE = 0x100, 0x400
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_DUMP_INTR = 0x10
RTM_NEWLINK, RTM_GETLINK = 16, 18
RTM_NEWADDR, RTM_GETADDR = 20, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWNEIGH = 28

IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_INFO_KIND = 1, 3, 4, 18, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
IFA_F_NODAD = 0x02
RTA_DST, RTA_SRC, RTA_OIF, RTA_GATEWAY, RTA_PREFSRC, RTA_METRICS = 1, 2, 4, 5, 7, 8
RTAX_MTU = 2
NDA_DST, NDA_LLADDR = 1, 2
IFF_UP, IFF_NOARP = 0x1, 0x80
RT_TABLE_MAIN, RTPROT_KERNEL, RTPROT_BOOT, RTN_UNICAST = 254, 2, 3, 1
NUD_PERMANENT = 0x80

_HEADER = Struct("=IHHII")
_ATTRIBUTE = Struct("=HH")
LINK = Struct("=BxHiII")  # family, type, index, flags, change
ADDRESS = Struct("=BBBBI")  # family, prefix, flags, scope, index
ROUTE = Struct("=BBBBBBBBI")  # family, dst bits, src bits, tos, table, protocol, scope, type, flags
NEIGHBOUR = Struct("=BxxxiHBB")  # family, index, state, flags, type
_ERROR = Struct("=i")
_BUFFER_BYTES = 1 << 18
_TYPE_MASK = 0x3FFF
_MAX_DUMPS = 5

Attributes: TypeAlias = dict[int, bytes]


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + b"\0" * (-size % 4)


def number(kind: int, value: int) -> bytes:
    return attribute(kind, value.to_bytes(4, sys.byteorder))


def parse_attributes(data: bytes) -> Attributes:
    """Attribute kind -> value; of a repeated kind the last. Stops at the first that is cut short."""
    found: Attributes = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size or at + size > len(data):
            break
        found[kind & _TYPE_MASK] = data[at + _ATTRIBUTE.size : at + size]
        at += size + (-size % 4)
    return found


def message(kind: int, flags: int, serial: int, body: bytes) -> bytes:
    """One netlink message with its header."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, serial, 0) + body


def split(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, flags, serial, body) of each message in a datagram; stops at the first that is cut short."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, flags, serial, _port = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return
        yield kind, flags, serial, data[at + _HEADER.size : at + size]
        at += size + (-size % 4)


class Netlink:
    """An open rtnetlink socket: `with Netlink() as netlink`. Errors are OSError with the kernel's errno."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        self._serial = 0

    def __enter__(self) -> Netlink:
        self._socket.bind((0, 0))
        self._socket.settimeout(5.0)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def request(self, kind: int, flags: int, body: bytes) -> None:
        """The kernel has carried out the request."""
        self._serial += 1
        self._socket.send(message(kind, NLM_F_REQUEST | NLM_F_ACK | flags, self._serial, body))
        while True:
            for reply, _flags, serial, data in split(self._socket.recv(_BUFFER_BYTES)):
                if serial == self._serial and reply == NLMSG_ERROR:
                    _raise(data)
                    return

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Every object of a kind. A dump that a change has interrupted is repeated."""
        for _ in range(_MAX_DUMPS):
            found, interrupted = self._dump(kind, body)
            if not interrupted:
                break
        return found

    def _dump(self, kind: int, body: bytes) -> tuple[list[bytes], bool]:
        self._serial += 1
        self._socket.send(message(kind, NLM_F_REQUEST | NLM_F_DUMP, self._serial, body))
        found: list[bytes] = []
        interrupted = False
        while True:
            for reply, flags, serial, data in split(self._socket.recv(_BUFFER_BYTES)):
                if serial != self._serial:
                    continue
                interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
                if reply == NLMSG_DONE:
                    return found, interrupted
                if reply == NLMSG_ERROR:
                    _raise(data)
                found.append(data)


def _raise(data: bytes) -> None:
    (code,) = _ERROR.unpack_from(data)
    if code:
        raise OSError(-code, os.strerror(-code))
