"""The child that wires a pod's network for the shim, inside the pod's network namespace.

It answers the shim's questions on the socket SOCKET_FD, and ends when that closes. It decides nothing: the shim writes
each resource into the ledger before it asks for it.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from pyshim.host.python_child.messages import SOCKET_FD, Inbox, MessageTooLong, send
from pyshim.resources.network.host import loopback_steering, netlink, taps


def main() -> None:
    """Answers questions until the shim closes its end."""
    inbox = Inbox()
    with socket.socket(fileno=SOCKET_FD) as connection, netlink.IPRoute() as rtnl:
        while question := inbox.wait(connection):
            _answer(connection, rtnl, question[0])


def _answer(connection: socket.socket, rtnl: netlink.IPRoute, question: dict[str, Any]) -> None:
    step = _STEPS[question.pop("do")]
    fds: tuple[int, ...] = ()
    try:
        answer, fds = step(rtnl, **question)
        send(connection, {"ok": answer}, fds)
    except netlink.NetlinkError as error:
        send(connection, {"error": {"errno": error.code, "text": os.strerror(error.code)}})
    except MessageTooLong as error:
        send(connection, {"error": {"errno": 0, "text": str(error)}})
    except OSError as error:
        send(connection, {"error": {"errno": error.errno or 0, "text": error.strerror or str(error)}})
    finally:
        taps.close_fds(fds)


_Result = tuple[object, tuple[int, ...]]
"""The answer to a question, and the descriptors with it."""


def _scan(rtnl: netlink.IPRoute) -> _Result:
    return msgspec.to_builtins(netlink.scan(rtnl)), ()


def _tap(rtnl: netlink.IPRoute, *, name: str, queues: int, mtu: int, alias: str) -> _Result:
    with taps.closed_on_error() as fds:
        fds += taps.open_tap(name, queues)
        return netlink.start_tap(rtnl, name, mtu, alias), tuple(fds)


def _macvtap(rtnl: netlink.IPRoute, *, name: str, link: int, queues: int, mtu: int, alias: str) -> _Result:
    netlink.make_macvtap(rtnl, name, link)
    index = netlink.start_tap(rtnl, name, mtu, alias)
    taps.leave_mount_namespace()
    return index, taps.open_macvtap(taps.macvtap_device_number(name, index), queues)


def _redirect(rtnl: netlink.IPRoute, *, tap: int, link: int) -> _Result:
    netlink.redirect(rtnl, tap, link)
    return None, ()


def _limit(rtnl: netlink.IPRoute, *, index: int, bits_s: int, mtu: int) -> _Result:
    netlink.limit_rate(rtnl, index, bits_s, mtu)
    return None, ()


def _steer(_rtnl: netlink.IPRoute) -> _Result:
    return None, loopback_steering.steer_loopback()


def _watch(_rtnl: netlink.IPRoute) -> _Result:
    return None, (netlink.open_news(),)


_STEPS: dict[str, Callable[..., _Result]] = {
    "scan": _scan,
    "tap": _tap,
    "macvtap": _macvtap,
    "redirect": _redirect,
    "limit": _limit,
    "steer": _steer,
    "watch": _watch,
}
