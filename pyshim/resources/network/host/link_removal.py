"""Deleting an interface or an ingress qdisc, in any network namespace, over a bare rtnetlink socket.

pyroute2 makes links (it costs a good part of a second to import); deleting one takes a message of forty bytes, and
`delete` has no time for that import. Source: rtnetlink(7), linux/rtnetlink.h, linux/pkt_sched.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable

from pyshim.resources.network.host.rtnetlink import ATTRIBUTE, HEADER, IFLA_IFNAME, RTM_DELLINK, in_netns

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


def delete_link(name: str, *, netns: str, inode: int = 0) -> None:
    """No interface `name` exists in the namespace ("": this process's own). Raises OSError.

    With `inode`, nothing happens if `netns` leads to a namespace of another inode.
    """
    text = os.fsencode(name) + b"\0"
    attribute = ATTRIBUTE.pack(ATTRIBUTE.size + len(text), IFLA_IFNAME) + text
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute + bytes(-len(attribute) % 4)
    _request((netns, inode), name, RTM_DELLINK, lambda _index: body)


def delete_ingress(name: str, *, netns: str, inode: int = 0) -> None:
    """The interface has no ingress qdisc, or does not exist; `inode` as above. Raises OSError."""
    _request((netns, inode), name, _RTM_DELQDISC, lambda index: _TCMSG.pack(0, index, 0, _TC_H_INGRESS, 0))


def delete_qdisc(name: str, *, netns: str, inode: int = 0) -> None:
    """The interface does not have our root qdisc, or does not exist; `inode` as above. Raises OSError."""

    def body(index: int) -> bytes:
        return _TCMSG.pack(0, index, RATE_LIMIT_HANDLE, _TC_H_ROOT, 0)

    # EINVAL: the qdisc has another handle.
    _request((netns, inode), name, _RTM_DELQDISC, body, errno.EINVAL)


def _request(place: tuple[str, int], name: str, kind: int, body: Callable[[int], bytes], *fine: int) -> None:
    """The kernel has carried out the request about the interface, or namespace or interface does not exist."""

    def work() -> bytes | None:
        try:
            payload = body(socket.if_nametoindex(name))
        except OSError:
            return None  # no such interface
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
