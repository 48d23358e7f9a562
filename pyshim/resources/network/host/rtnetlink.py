"""Links of any network namespace over a bare rtnetlink socket: removed, found by their alias, watched.

pyroute2 makes links, in the child (it costs a good part of a second to import). Deleting one takes a message of forty
bytes, and `delete` has no time for that import.
Source: rtnetlink(7), netlink(7), linux/rtnetlink.h, linux/if_link.h, linux/pkt_sched.h.
"""

import asyncio
import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.threads import in_short_thread
from pyshim.model.errors import Unavailable

T = TypeVar("T")

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


def in_netns(netns: str, inode: int, work: Callable[[], T]) -> T:
    """The result of `work` in that network namespace ("": this process's own). A socket made there stays there.

    Raises FileNotFoundError if the namespace, with this inode if one is given, is not at that path.
    """

    def run() -> T:
        if netns:
            _enter(netns, inode)
        return work()

    return in_short_thread(run)


def _enter(netns: str, inode: int) -> None:
    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if inode and os.fstat(fd).st_ino != inode:
            # The path leads to another namespace, perhaps to the host's own.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        syscalls.setns(fd, syscalls.CLONE_NEWNET)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # A plain file: the namespace that was bound here has been unmounted, and its links went with it.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns) from error
        raise
    finally:
        os.close(fd)


_NLM_F_REQUEST = 1
_NLM_F_ACK = 4
_NLMSG_ERROR = 2
_RTM_DELQDISC = 37
_TC_H_INGRESS, _TC_H_ROOT = 0xFFFFFFF1, 0xFFFFFFFF
RATE_LIMIT_HANDLE = 0x70790000
"""Handle of our root qdiscs, which limit a rate; it distinguishes them from those of other programs."""
_IFINFO = struct.Struct("=BxHiII")
_TCMSG = struct.Struct("=BxxxiIII")
_ANSWER_TIMEOUT_S = 2


def delete_link(name: str, *, netns: str, inode: int = 0, index: int = 0) -> None:
    """The interface does not exist in the namespace ("": this process's own). Raises OSError.

    With `inode`, nothing happens if `netns` leads to a namespace of another inode. With `index`, the interface is the
    one with that index, whatever its name is: one made later under the same name stays. A namespace gives an index to
    one interface only, until 2**31 have been made.
    """
    _request((netns, inode), name, index, RTM_DELLINK, lambda found: _IFINFO.pack(0, 0, found, 0, 0))


def delete_ingress(name: str, *, netns: str, inode: int = 0, index: int = 0) -> None:
    """The interface has no ingress qdisc, or does not exist; `inode` and `index` as above. Raises OSError."""

    def body(found: int) -> bytes:
        return _TCMSG.pack(0, found, 0, _TC_H_INGRESS, 0)

    _request((netns, inode), name, index, _RTM_DELQDISC, body)


def delete_qdisc(name: str, *, netns: str, inode: int = 0, index: int = 0) -> None:
    """The interface does not have our root qdisc, or does not exist; `inode` and `index` as above. Raises OSError."""

    def body(found: int) -> bytes:
        return _TCMSG.pack(0, found, RATE_LIMIT_HANDLE, _TC_H_ROOT, 0)

    # EINVAL: the qdisc has another handle.
    _request((netns, inode), name, index, _RTM_DELQDISC, body, errno.EINVAL)


def _request(
    place: tuple[str, int], name: str, index: int, kind: int, body: Callable[[int], bytes], *fine: int
) -> None:
    """The kernel has carried out the request about the interface, or namespace or interface does not exist."""

    def work() -> bytes | None:
        try:
            payload = body(index or socket.if_nametoindex(name))
        except (OSError, struct.error):
            return None  # no interface has that name, or can have that index
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.send(HEADER.pack(HEADER.size + len(payload), kind, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + payload)
            return connection.recv(65536)

    try:
        answer = in_netns(*place, work)
    except FileNotFoundError:
        return
    if answer is None:
        return
    _, answer_kind, _, _, _ = HEADER.unpack_from(answer)
    if answer_kind != _NLMSG_ERROR:
        raise OSError(errno.EPROTO, "rtnetlink answered with something else than an acknowledgement", name)
    number = -struct.unpack_from("=i", answer, HEADER.size)[0]
    if number not in (0, errno.ENODEV, errno.ENOENT, *fine):
        raise OSError(number, os.strerror(number), name)


NETNS_ROOT = "/run/netns"
"""CNI and `ip netns` bind the namespaces of pods here."""
_PREFIX = "pykata"
_RTM_GETLINK = 18
_NLM_F_DUMP = 0x300
_NLMSG_DONE = 3
_IFLA_IFALIAS = 20


class OurTap(NamedTuple):
    """A tap whose alias names its sandbox."""

    netns: str
    name: str
    ifindex: int
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
        for index, link, alias in _links_of(netns):
            prefix, _, rest = alias.partition(":")
            owner, colon, wired = rest.partition(":")
            if prefix == _PREFIX and owner and colon:
                found.append(OurTap(netns, link, index, owner, wired))
    return tuple(found)


def _links_of(netns: str) -> list[tuple[int, str, str]]:
    """Index, name and alias of every link in the namespace; empty if the namespace does not exist."""
    try:
        return in_netns(netns, 0, lambda: list(_dump()))
    except OSError:
        return []


def _dump() -> Iterator[tuple[int, str, str]]:
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
                index: int = _IFINFO.unpack_from(body)[2]
                yield index, _text(texts.get(IFLA_IFNAME, b"")), _text(texts.get(_IFLA_IFALIAS, b""))
    finally:
        connection.close()


def _text(attribute: bytes) -> str:
    return os.fsdecode(attribute.rstrip(b"\0"))


_RTM_NEWADDR, _RTM_DELADDR, _RTM_NEWROUTE, _RTM_DELROUTE = 20, 21, 24, 25
_RT_SCOPE_LINK = 253
_RT_TABLE_MAIN = 254
_RTPROT_KERNEL = 2
_RTN_UNICAST = 1
_NEWS_GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE."""
_OUR_TAP = re.compile(rb"veth[0-9]{1,9}_kata")
_ADDRESS = struct.Struct("=BBBBi")
_ROUTE = struct.Struct("=BBBBBBBBI")
_READ_BYTES = 1 << 16


def open_news() -> OwnedFd:
    """A socket that receives changes of links, addresses and routes of the calling thread's namespace."""
    flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, flags, socket.NETLINK_ROUTE) as news:
        news.bind((0, _NEWS_GROUPS))
        return OwnedFd(news.detach())


class Watch:
    """Owns the socket, which `open_news` made in the namespace."""

    def __init__(self, news: OwnedFd) -> None:
        self._news = socket.socket(fileno=news.steal())
        self._news.setblocking(False)  # the descriptor is non-blocking already, but asyncio checks the object

    async def changed(self) -> None:
        """A change has happened that may concern the guest: the namespace is to be read again. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, (sender, _groups) = await loop.sock_recvfrom(self._news, _READ_BYTES)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    return  # more changes than the socket's buffer holds
                cause = os.strerror(error.errno or 0).lower()
                raise Unavailable(f"watch network namespace: {cause}") from error
            # Any process of the namespace can send to the socket; only the kernel's messages count.
            if sender == 0 and is_news(data):
                return

    def forget(self) -> bool:
        """Changes until now are dropped: the caller reads the namespace next. True if one may concern the guest."""
        found = False
        while True:
            try:
                data, (sender, _groups) = self._news.recvfrom(_READ_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    return found
                found = True
            else:
                found = found or (sender == 0 and is_news(data))

    def close(self) -> None:
        """Idempotent."""
        self._news.close()


def is_news(data: bytes) -> bool:
    """True for a message about a link that is gone, an address that a guest would have, or a route that a program set.

    A new link counts once it has an address. Addresses and routes that the kernel makes by itself as a link goes up do
    not count: the guest's kernel makes them too. The removal of a tap of ours does not count: it follows a link that
    could not be connected, and that link would be tried again at once, without end.
    """
    return any(_concerns_guest(kind, body) for kind, body in messages(data))


def _concerns_guest(kind: int, body: bytes) -> bool:
    if kind in (_RTM_NEWADDR, _RTM_DELADDR) and len(body) >= _ADDRESS.size:
        scope: int = _ADDRESS.unpack_from(body)[3]
        return scope < _RT_SCOPE_LINK
    if kind in (_RTM_NEWROUTE, _RTM_DELROUTE) and len(body) >= _ROUTE.size:
        _, _, _, _, table, protocol, _, route_type, _ = _ROUTE.unpack_from(body)
        return (table, route_type) == (_RT_TABLE_MAIN, _RTN_UNICAST) and protocol != _RTPROT_KERNEL
    return kind == RTM_DELLINK and not _OUR_TAP.fullmatch(_link_name(body))


def _link_name(body: bytes) -> bytes:
    """The name in a message about a link; empty when it has none."""
    names = (text for kind, text in attributes(body[IFINFO_BYTES:]) if kind == IFLA_IFNAME)
    return next(names, b"").rstrip(b"\0")
