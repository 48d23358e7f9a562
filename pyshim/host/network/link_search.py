"""Finding our taps in the host's network namespaces by their alias, over a bare rtnetlink socket.

Source: rtnetlink(7), linux/if_link.h. As `link_removal`, without pyroute2: `delete` has no site-packages.
"""

import _socket
import os
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from pyshim.host import syscalls

NETNS_ROOT = "/run/netns"
"""Where CNI and `ip netns` bind the namespaces of pods."""
_PREFIX = "pykata"
_RTM_GETLINK = 18
_NLM_F_REQUEST = 1
_NLM_F_DUMP = 0x300
_NLMSG_DONE = 3
_NLMSG_ERROR = 2
_IFLA_IFNAME = 3
_IFLA_IFALIAS = 20
_HEADER = struct.Struct("=IHHII")
_IFINFO_BYTES = 16
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_TIMEOUT_S = 2


class OurTap(NamedTuple):
    """A tap that says whose it is."""

    netns: str
    name: str
    owner: str
    link: str
    """The link of the namespace that our filters wire it to; empty for a tap that needs none."""


def tap_alias(owner: str, link: str) -> str:
    """What a tap of the sandbox `owner`, wired by filters to `link` if any, has as its alias."""
    return f"{_PREFIX}:{owner}:{link}"


def our_taps(root: str = NETNS_ROOT) -> tuple[OurTap, ...]:
    """Every tap with an alias of ours in the namespaces bound below `root`; a stale file is skipped."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return ()
    found = []
    for name in names:
        netns = f"{root}/{name}"
        for link, alias in _links_of(netns):
            prefix, _, rest = alias.partition(":")
            owner, colon, wired = rest.partition(":")
            if prefix == _PREFIX and owner and colon:
                found.append(OurTap(netns, link, owner, wired))
    return tuple(found)


def _links_of(netns: str) -> list[tuple[str, str]]:
    """Name and alias of every link in the namespace; a thread of its own goes there and ends."""
    links: list[tuple[str, str]] = []

    def work() -> None:
        try:
            fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.setns(fd, syscalls.CLONE_NEWNET)
            finally:
                os.close(fd)
            links.extend(_dump())
        except OSError:
            # Not a namespace (any more).
            return

    thread = threading.Thread(target=work, name=f"netns {netns}")
    thread.start()
    thread.join()
    return links


def _dump() -> Iterator[tuple[str, str]]:
    connection = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, _socket.NETLINK_ROUTE)
    try:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        size = _HEADER.size + _IFINFO_BYTES
        connection.send(_HEADER.pack(size, _RTM_GETLINK, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + bytes(_IFINFO_BYTES))
        while True:
            answer = connection.recv(1 << 18)
            offset = 0
            while offset + _HEADER.size <= len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, offset)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                    return
                texts = dict(_texts(answer[offset + size : offset + length]))
                yield texts.get(_IFLA_IFNAME, ""), texts.get(_IFLA_IFALIAS, "")
                offset += (length + 3) & ~3
    finally:
        connection.close()


def _texts(attributes: bytes) -> Iterator[tuple[int, str]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, offset)
        if length < _ATTRIBUTE.size:
            return
        if kind in (_IFLA_IFNAME, _IFLA_IFALIAS):
            yield kind, os.fsdecode(attributes[offset + _ATTRIBUTE.size : offset + length].rstrip(b"\0"))
        offset += (length + 3) & ~3
