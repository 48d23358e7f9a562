"""Finding our taps in the host's network namespaces by their alias, over a bare rtnetlink socket.

Source: rtnetlink(7), linux/if_link.h. Without pyroute2, for the reason `link_removal` gives.
"""

import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from pyshim.resources.network.host.rtnetlink import HEADER, IFINFO_BYTES, IFLA_IFNAME, attributes, in_netns, messages

NETNS_ROOT = "/run/netns"
"""CNI and `ip netns` bind the namespaces of pods here."""
_PREFIX = "pykata"
_RTM_GETLINK = 18
_NLM_F_REQUEST = 1
_NLM_F_DUMP = 0x300
_NLMSG_DONE = 3
_NLMSG_ERROR = 2
_IFLA_IFALIAS = 20
_ANSWER_TIMEOUT_S = 2


class OurTap(NamedTuple):
    """A tap whose alias names its sandbox."""

    netns: str
    name: str
    owner: str
    link: str
    """The link of the namespace that our filters wire it to; empty for a tap that needs none."""


def tap_alias(owner: str, link: str) -> str:
    """The alias of a tap of the sandbox `owner`, wired by filters to `link` if any."""
    return f"{_PREFIX}:{owner}:{link}"


def our_taps(root: str = NETNS_ROOT) -> tuple[OurTap, ...]:
    """Every tap with our alias in the namespaces bound below `root`; a stale file is skipped."""
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
    """Name and alias of every link in the namespace; empty if the namespace does not exist."""
    try:
        return in_netns(netns, 0, lambda: list(_dump()))
    except OSError:
        return []


def _dump() -> Iterator[tuple[str, str]]:
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    try:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        size = HEADER.size + IFINFO_BYTES
        connection.send(HEADER.pack(size, _RTM_GETLINK, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + bytes(IFINFO_BYTES))
        while True:
            for kind, body in messages(connection.recv(1 << 18)):
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return
                texts = dict(attributes(body[IFINFO_BYTES:]))
                yield _text(texts.get(IFLA_IFNAME, b"")), _text(texts.get(_IFLA_IFALIAS, b""))
    finally:
        connection.close()


def _text(attribute: bytes) -> str:
    return os.fsdecode(attribute.rstrip(b"\0"))
