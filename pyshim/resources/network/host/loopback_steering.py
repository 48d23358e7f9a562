"""One listening socket takes every TCP connection to a namespace's loopback addresses, on any port.

Kubernetes' port-forward dials `localhost:<port>` in the pod's network namespace, and the port is known only then. A NAT
rule of nftables redirects all such connections to our socket; the kernel keeps the port that was dialled.

The rule is in a table that belongs to a netlink socket (NFT_TABLE_F_OWNER): the kernel removes the table when that
socket is closed, also when the shim is killed, and lets no other process change it. So it needs no entry in the ledger.
Tables of CNI are not touched. Needs Linux 5.12 with nf_tables, its NAT chains and `redirect`.
Source: linux/netfilter/nf_tables.h; nft(8) for the rules in words.
"""

import os
import socket
import struct
from typing import Any

from pyroute2.netlink.nfnetlink.nftsocket import NFPROTO_INET, NFPROTO_IPV4, NFPROTO_IPV6, Cmp, Meta, Regs
from pyroute2.nftables.expressions import genex
from pyroute2.nftables.main import NFTables

_TABLE = "pyshim"
_CHAIN = "output"
_TABLE_OWNED = 2
"""NFT_TABLE_F_OWNER."""
_BEFORE_ROUTING = -100
"""Priority of the chain: NF_IP_PRI_NAT_DST, the one of every rule that changes a destination."""
_NETWORK_HEADER = 1
"""NFT_PAYLOAD_NETWORK_HEADER: offsets of the payload count from the IP header."""
_DESTINATION_OFFSET = {NFPROTO_IPV4: 16, NFPROTO_IPV6: 24}
"""Bytes, in the header of each family. Source: RFC 791, RFC 8200."""
_LOOPBACK = {NFPROTO_IPV4: b"\x7f", NFPROTO_IPV6: socket.inet_pton(socket.AF_INET6, "::1")}
"""First bytes of the destination: 127.0.0.0/8 and ::1."""
_BACKLOG = 64


def steer_loopback() -> tuple[int, int]:
    """A listening TCP socket, and the owner of the rule that steers connections to it, in this thread's namespace.

    The address that was dialled, its port included, is an accepted connection's original destination. Both descriptors
    are the caller's; steering ends when the second is closed. Raises OSError or NetlinkError where the kernel has no
    such rules, or another sandbox steers in this namespace.
    """
    listener = _listen()
    try:
        owner = _redirect_to(listener.getsockname()[1])
    except BaseException:
        listener.close()
        raise
    return listener.detach(), owner


def _listen() -> socket.socket:
    """On an IPv6 socket that takes IPv4 as well; on IPv4 alone where the kernel has nothing else."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # The wildcard is the one address both families share. The port is any free one, and cannot be reached from
            # outside: frames go past this namespace's stack to the VM.
            listener.bind(("::", 0))
        else:
            listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _redirect_to(port: int) -> int:
    nft = NFTables(nfgen_family=NFPROTO_INET)
    try:
        # First a question, which a kernel without nf_tables refuses. For a change pyroute2 would wait without end.
        nft.get_tables()
        nft.table("create", name=_TABLE, NFTA_TABLE_FLAGS=_TABLE_OWNED)
        nft.chain("create", table=_TABLE, name=_CHAIN, type="nat", hook="output", priority=_BEFORE_ROUTING)
        for family in (NFPROTO_IPV4, NFPROTO_IPV6):
            nft.rule("create", table=_TABLE, chain=_CHAIN, expressions=[_rule(family, port)])
        return os.dup(nft.fileno())
    finally:
        nft.close()


def _rule(family: int, port: int) -> list[Any]:
    """`meta nfproto FAMILY meta l4proto tcp FAMILY daddr LOOPBACK redirect to :PORT`, as the kernel's expressions."""
    loopback = _LOOPBACK[family]
    destination = {"base": _NETWORK_HEADER, "offset": _DESTINATION_OFFSET[family], "len": len(loopback)}
    register = Regs.NFT_REG_1
    return [
        genex("meta", {"key": Meta.NFT_META_NFPROTO, "dreg": register}),
        _equals(bytes([family])),
        genex("meta", {"key": Meta.NFT_META_L4PROTO, "dreg": register}),
        _equals(bytes([socket.IPPROTO_TCP])),
        genex("payload", {"dreg": register, **destination}),
        _equals(loopback),
        genex("immediate", {"dreg": register, "data": _value(struct.pack("!H", port))}),
        genex("redir", {"reg_proto_min": register}),
    ]


def _equals(content: bytes) -> Any:
    return genex("cmp", {"sreg": Regs.NFT_REG_1, "op": Cmp.NFT_CMP_EQ, "data": _value(content)})


def _value(content: bytes) -> Any:
    return {"attrs": [("NFTA_DATA_VALUE", content)]}
