"""Changes in a pod's network namespace, read on the shim's loop from a route socket that the child made there.

The kernel reports changes; nothing is polled. Only a change that may concern an interface or route of the guest wakes
the caller. Source: rtnetlink(7), linux/rtnetlink.h.
"""

import asyncio
import errno
import os
import re
import socket
import struct

from pyshim.host.fds import OwnedFd
from pyshim.model.errors import Unavailable
from pyshim.resources.network.host.rtnetlink import IFINFO_BYTES, IFLA_IFNAME, RTM_DELLINK, attributes, messages

_RTM_NEWADDR, _RTM_DELADDR, _RTM_NEWROUTE, _RTM_DELROUTE = 20, 21, 24, 25
_RT_SCOPE_LINK = 253
_RT_TABLE_MAIN = 254
_RTPROT_KERNEL = 2
_RTN_UNICAST = 1
_OUR_TAP = re.compile(rb"veth[0-9]{1,9}_kata")
_ADDRESS = struct.Struct("=BBBBi")
_ROUTE = struct.Struct("=BBBBBBBBI")
_READ_BYTES = 1 << 16


class Watch:
    """Owns the socket, which `netlink.open_news` made in the namespace."""

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

    def forget(self) -> None:
        """Changes until now are dropped: the caller has just read the namespace."""
        while True:
            try:
                self._news.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    return

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
