"""The child the shim keeps in a pod's network namespace for as long as it takes to wire it.

It starts there, answers the shim's questions on the socket it was given as SOCKET_FD, and ends when that closes. It
decides nothing and remembers nothing: the shim writes each resource into the ledger before asking for it.
"""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pyshim.host.python_child.messages import SOCKET_FD, Inbox, MessageTooLong, send
from pyshim.resources.network.host import loopback_steering, netlink, taps


def main() -> None:
    """Every question has been answered and the shim has closed its end."""
    inbox = Inbox()
    with socket.socket(fileno=SOCKET_FD) as connection, netlink.IPRoute() as rtnl:
        while question := inbox.wait(connection):
            _answer(connection, rtnl, question[0])


def _answer(connection: socket.socket, rtnl: netlink.IPRoute, question: Mapping[str, Any]) -> None:
    steps: Mapping[str, Callable[[netlink.IPRoute, Mapping[str, Any]], tuple[object, tuple[int, ...]]]] = {
        "scan": _scan,
        "tap": _tap,
        "macvtap": _macvtap,
        "redirect": _redirect,
        "limit": _limit,
        "steer": _steer,
        "watch": _watch,
    }
    step = steps[question["do"]]
    fds: tuple[int, ...] = ()
    try:
        answer, fds = step(rtnl, question)
        send(connection, {"ok": answer}, fds)
    except netlink.NetlinkError as error:
        send(connection, {"error": {"errno": error.code, "text": os.strerror(error.code)}})
    except MessageTooLong as error:
        send(connection, {"error": {"errno": 0, "text": str(error)}})
    except OSError as error:
        send(connection, {"error": {"errno": error.errno or 0, "text": error.strerror or str(error)}})
    finally:
        taps.close_fds(fds)


def _scan(rtnl: netlink.IPRoute, _question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    return msgspec.to_builtins(netlink.scan(rtnl)), ()


def _tap(rtnl: netlink.IPRoute, question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    fds = taps.open_tap(question["name"], question["queues"])
    try:
        return netlink.start_tap(rtnl, question["name"], question["mtu"], question["alias"]), fds
    except BaseException:
        taps.close_fds(fds)
        raise


def _macvtap(rtnl: netlink.IPRoute, question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    name = question["name"]
    netlink.make_macvtap(rtnl, name, question["link"])
    index = netlink.start_tap(rtnl, name, question["mtu"], question["alias"])
    taps.leave_mount_namespace()
    return index, taps.open_macvtap(taps.macvtap_device_number(name, index), question["queues"])


def _redirect(rtnl: netlink.IPRoute, question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    netlink.redirect(rtnl, question["tap"], question["link"])
    return None, ()


def _limit(rtnl: netlink.IPRoute, question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    netlink.limit_rate(rtnl, question["index"], question["bits_s"], question["mtu"])
    return None, ()


def _steer(_rtnl: netlink.IPRoute, _question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    return None, loopback_steering.steer_loopback()


def _watch(_rtnl: netlink.IPRoute, _question: Mapping[str, Any]) -> tuple[object, tuple[int, ...]]:
    return None, (netlink.open_news(),)
