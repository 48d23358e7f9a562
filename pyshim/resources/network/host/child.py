"""The child inside a pod's network namespace: it reports what is there, and wires links to taps, for the shim.

It answers the shim's questions on the socket SOCKET_FD, and ends when that closes. It decides nothing: the shim writes
each resource into the ledger before it asks for it. It is short-lived because pyroute2 takes a tenth of a second and
twenty megabytes, which the shim would hold as long as the pod lives.
"""

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError

from pyshim.host import syscalls
from pyshim.host.python_child import SOCKET_FD, Inbox, MessageTooLong, send
from pyshim.host.threads import in_short_thread
from pyshim.model.network import AddressReport, LinkReport, NeighbourReport, NetworkScan, RouteReport
from pyshim.resources.network.host import loopback_steering, taps
from pyshim.resources.network.host.rtnetlink import RATE_LIMIT_HANDLE, open_news

T = TypeVar("T")

_ETH_P_ALL = 0x0003
_INGRESS_HANDLE = 0xFFFF0000
_INGRESS_KINDS = frozenset({"ingress", "clsact"})
_ADDR_GEN_MODE_NONE = 1
_FRAME_HEADERS_BYTES = 18
_QUEUE_BYTES = 65536
_MAX_U32 = 0xFFFFFFFF
_DUMP_ATTEMPTS = 5
_SYSCTLS = "/proc/sys/net"
_SYSCTL_ROOTS = ("core", "ipv4", "ipv6", "netfilter")
_OF_INTERFACE = re.compile("^(ipv[46]/conf)/(?!all/|default/|lo/)[^/]+/")
_IS_HOSTS = re.compile("/neigh/|/lo$")
"""Directories without a counterpart in a new namespace, or without a meaning for the guest."""
_OWN_RULES = frozenset({0, 32766, 32767})
"""Priorities of the rules of a new namespace: the tables local, main and default."""
_BUSY_ATTEMPTS = 5
_BUSY_PAUSE_S = 0.01


def main() -> None:
    """Answers questions until the shim closes its end."""
    inbox = Inbox()
    with socket.socket(fileno=SOCKET_FD) as connection, IPRoute() as rtnl:
        while question := inbox.wait(connection):
            _answer(connection, rtnl, question[0])


def _answer(connection: socket.socket, rtnl: IPRoute, question: dict[str, Any]) -> None:
    step = _STEPS[question.pop("do")]
    fds: tuple[int, ...] = ()
    try:
        answer, fds = step(rtnl, **question)
        send(connection, {"ok": answer}, fds)
    except NetlinkError as error:
        send(connection, {"error": {"errno": error.code, "text": os.strerror(error.code)}})
    except MessageTooLong as error:
        send(connection, {"error": {"errno": 0, "text": str(error)}})
    except OSError as error:
        send(connection, {"error": {"errno": error.errno or 0, "text": error.strerror or str(error)}})
    finally:
        taps.close_fds(fds)


def scan(rtnl: IPRoute, *, with_sysctls: bool = False) -> NetworkScan:
    """All of the namespace that a plan needs. A link that goes away meanwhile may be in it without its addresses."""
    ingress = {
        int(message["index"]): str(message.get_attr("TCA_KIND"))
        for message in _dump(rtnl.get_qdiscs)
        if message.get_attr("TCA_KIND") in _INGRESS_KINDS
    }
    # Links come after their qdiscs and before addresses and routes: the plan ignores those of a link that is gone.
    links = tuple(_link(message, ingress) for message in _dump(rtnl.get_links))
    return NetworkScan(
        links=links,
        addresses=tuple(_address(message) for message in _dump(rtnl.get_addr)),
        routes=tuple(
            _route(message)
            for family in (socket.AF_INET, socket.AF_INET6)
            for message in _dump(partial(rtnl.get_routes, family=family))
        ),
        neighbours=tuple(
            _neighbour(message)
            for message in _dump(rtnl.get_neighbours)
            if message["family"] in (socket.AF_INET, socket.AF_INET6) and message.get_attr("NDA_DST")
        ),
        sysctls=_changed_sysctls() if with_sysctls else {},
        rules=tuple(
            _rule(message)
            for family in (socket.AF_INET, socket.AF_INET6)
            for message in _dump(partial(rtnl.get_rules, family=family))
            if message.get_attr("FRA_PRIORITY", 0) not in _OWN_RULES
        ),
    )


def _changed_sysctls() -> dict[str, str]:
    """The settings below /proc/sys/net that differ from those of a new namespace, by their path there.

    Those of an interface are compared with a new one's. In a thread, since a new namespace is entered.
    """
    here = dict(_sysctls())
    fresh = in_short_thread(_fresh_sysctls)
    return {path: value for path, value in here.items() if value != fresh.get(_OF_INTERFACE.sub(r"\1/default/", path))}


def _fresh_sysctls() -> dict[str, str]:
    syscalls.unshare(syscalls.CLONE_NEWNET)
    return dict(_sysctls())


def _sysctls() -> Iterator[tuple[str, str]]:
    for root in _SYSCTL_ROOTS:
        for directory, _, names in os.walk(f"{_SYSCTLS}/{root}"):
            if _IS_HOSTS.search(directory):
                continue
            for name in names:
                if name == "mtu":  # the link's, which the guest has
                    continue
                # Some can only be written, and an interface may go.
                with suppress(OSError), open(f"{directory}/{name}", encoding="utf-8", errors="replace") as file:
                    yield f"{directory}/{name}".removeprefix(f"{_SYSCTLS}/"), file.read().strip()


def _dump(ask: Callable[[], Iterable[T]]) -> tuple[T, ...]:
    """A consistent answer: if the kernel reports a change during its answer, it is asked again."""
    for _ in range(_DUMP_ATTEMPTS - 1):
        with suppress(NetlinkDumpInterrupted):
            return tuple(ask())
    return tuple(ask())


def _link(message: Any, ingress: dict[int, str]) -> LinkReport:
    index = int(message["index"])
    info = message.get_attr("IFLA_LINKINFO")
    return LinkReport(
        index=index,
        name=message.get_attr("IFLA_IFNAME"),
        kind=(info.get_attr("IFLA_INFO_KIND") if info else None) or "",
        hardware_type=message["ifi_type"],
        mac=message.get_attr("IFLA_ADDRESS") or "",
        mtu=message.get_attr("IFLA_MTU") or 0,
        flags=message["flags"],
        bus=message.get_attr("IFLA_PARENT_DEV_BUS_NAME") or "",
        device=message.get_attr("IFLA_PARENT_DEV_NAME") or "",
        ingress_qdisc=ingress.get(index, ""),
    )


def _address(message: Any) -> AddressReport:
    other = message.get_attr("IFA_ADDRESS")
    local = message.get_attr("IFA_LOCAL") or other
    return AddressReport(
        index=message["index"],
        address=local,
        prefix_length=message["prefixlen"],
        peer=other if other and other != local else "",
    )


def _route(message: Any) -> RouteReport:
    destination = message.get_attr("RTA_DST")
    metrics = message.get_attr("RTA_METRICS")
    beyond = ""
    if message.get_attr("RTA_MULTIPATH"):
        beyond = "several next hops"
    elif message.get_attr("RTA_VIA"):
        beyond = "a gateway of another family"
    elif message.get_attr("RTA_ENCAP"):
        beyond = "an encapsulation"
    return RouteReport(
        index=message.get_attr("RTA_OIF") or 0,
        family=6 if message["family"] == socket.AF_INET6 else 4,
        destination=f"{destination}/{message['dst_len']}" if destination and message["dst_len"] else "",
        gateway=message.get_attr("RTA_GATEWAY") or "",
        source=message.get_attr("RTA_PREFSRC") or "",
        table=message.get_attr("RTA_TABLE") or message["table"],
        protocol=message["proto"],
        scope=message["scope"],
        type=message["type"],
        flags=message["flags"],
        metric=message.get_attr("RTA_PRIORITY") or 0,
        mtu=(metrics.get_attr("RTAX_MTU") if metrics else None) or 0,
        beyond=beyond,
    )


def _rule(message: Any) -> str:
    """The parts of a rule that most have, as `ip rule` shows them."""
    source, target = message.get_attr("FRA_SRC"), message.get_attr("FRA_DST")
    words = ["from", f"{source}/{message['src_len']}" if source else "all"]
    words += ["to", f"{target}/{message['dst_len']}"] if target else []
    words += ["lookup", str(message.get_attr("FRA_TABLE") or message["table"])]
    return " ".join(words)


def _neighbour(message: Any) -> NeighbourReport:
    return NeighbourReport(
        index=message["ifindex"],
        address=message.get_attr("NDA_DST"),
        mac=message.get_attr("NDA_LLADDR") or "",
        state=message["state"],
        flags=message["flags"],
    )


def start_tap(rtnl: IPRoute, name: str, mtu: int, alias: str) -> int:
    """The index of the tap, which is up, has its link's MTU, and sends nothing of its own."""
    (message,) = rtnl.get_links(ifname=name)
    index = int(message["index"])
    with suppress(NetlinkError):
        # The host's end gets no IPv6 address: the guest must receive frames of the link only. A kernel without IPv6
        # refuses the setting.
        quiet = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", _ADDR_GEN_MODE_NONE]]}]]}
        rtnl.link("set", index=index, IFLA_AF_SPEC=quiet)
    rtnl.link("set", index=index, mtu=mtu, ifalias=alias)
    rtnl.link("set", index=index, state="up")
    return index


def make_macvtap(rtnl: IPRoute, name: str, link_index: int) -> None:
    """The macvtap `name` gets every frame of the link, whose address it shares; the link's own stack sees none.

    `passthru` is the one mode that asks nothing of the link: its address and its IP addresses stay, and one deletion
    undoes all. The kernel refuses with EBUSY or EINVAL a link whose frames another device takes already.
    """
    rtnl.link("add", ifname=name, kind="macvtap", link=link_index, macvtap_mode="passthru")


def redirect(rtnl: IPRoute, tap_index: int, link_index: int) -> None:
    """Every frame that arrives at the link leaves by the tap, and the reverse; the host's own stack sees none."""
    for index in (tap_index, link_index):
        _add_ingress(rtnl, index)
    for source, target in ((link_index, tap_index), (tap_index, link_index)):
        rtnl.tc(
            "add-filter",
            "u32",
            source,
            parent=_INGRESS_HANDLE,
            protocol=_ETH_P_ALL,
            target=0,
            keys=["0x0/0x0+0"],
            action={"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": target},
        )


def limit_rate(rtnl: IPRoute, index: int, bits_s: int, mtu: int) -> None:
    """The interface sends no more than that, in bursts of 10 ms or one frame; what waits longer than 50 ms is dropped.

    The kernel refuses with EEXIST where another root qdisc is in place.
    """
    bytes_s = bits_s // 8
    burst = max(bytes_s // 100, mtu + _FRAME_HEADERS_BYTES)
    limit = min(burst + max(bytes_s // 20, _QUEUE_BYTES), _MAX_U32)
    rtnl.tc("add", "tbf", index, RATE_LIMIT_HANDLE, rate=bytes_s, burst=burst, limit=limit)


def _add_ingress(rtnl: IPRoute, index: int) -> None:
    """The kernel answers EBUSY while it is still taking down a former one; that passes."""
    for attempt in range(1, _BUSY_ATTEMPTS + 1):
        try:
            rtnl.tc("add", "ingress", index)
        except NetlinkError as error:
            if error.code != errno.EBUSY or attempt == _BUSY_ATTEMPTS:
                raise
            time.sleep(attempt * _BUSY_PAUSE_S)
        else:
            return


# ---- the steps, by the name in the question

_Result = tuple[object, tuple[int, ...]]
"""The answer to a question, and the descriptors with it."""


def _scan(rtnl: IPRoute, *, with_sysctls: bool) -> _Result:
    return msgspec.to_builtins(scan(rtnl, with_sysctls=with_sysctls)), ()


def _tap(rtnl: IPRoute, *, name: str, queues: int, mtu: int, alias: str) -> _Result:
    with taps.closed_on_error() as fds:
        fds += taps.open_tap(name, queues)
        return start_tap(rtnl, name, mtu, alias), tuple(fds)


def _macvtap(rtnl: IPRoute, *, name: str, link: int, queues: int, mtu: int, alias: str) -> _Result:
    make_macvtap(rtnl, name, link)
    index = start_tap(rtnl, name, mtu, alias)
    taps.leave_mount_namespace()
    return index, taps.open_macvtap(taps.macvtap_device_number(name, index), queues)


def _redirect(rtnl: IPRoute, *, tap: int, link: int) -> _Result:
    redirect(rtnl, tap, link)
    return None, ()


def _limit(rtnl: IPRoute, *, index: int, bits_s: int, mtu: int) -> _Result:
    limit_rate(rtnl, index, bits_s, mtu)
    return None, ()


def _steer(_rtnl: IPRoute) -> _Result:
    return None, loopback_steering.steer_loopback()


def _watch(_rtnl: IPRoute) -> _Result:
    return None, (open_news().steal(),)


_STEPS: dict[str, Callable[..., _Result]] = {
    "scan": _scan,
    "tap": _tap,
    "macvtap": _macvtap,
    "redirect": _redirect,
    "limit": _limit,
    "steer": _steer,
    "watch": _watch,
}
