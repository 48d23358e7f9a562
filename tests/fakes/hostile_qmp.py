"""A QEMU that lies on its QMP socket. Its modes are data: each says what becomes of one command.

A guest that has taken over QEMU can say anything there.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from pyshim.model.units import MIB
from tests.fakes.qmp_peer import Answer, QmpPeer


def forget(_peer: QmpPeer, _request: dict[str, Any]) -> None:
    """No answer."""


def value(given: object) -> Answer:
    return lambda peer, request: peer.reply(request, given)


def raw(make: Callable[[Any], bytes]) -> Answer:
    """What `make` gives for the id of the request."""
    return lambda peer, request: peer.send(make(request.get("id")) + b"\r\n")


def flood(peer: QmpPeer, request: dict[str, Any]) -> None:
    for number in range(500):
        peer.event("NO_SUCH_EVENT", {"number": number, "text": "x" * 1000})
    peer.reply(request, {})


def many_values(peer: QmpPeer, request: dict[str, Any]) -> None:
    """Small on the wire; decoded, it would be half a GiB."""
    peer.send(b'{"return": [' + b"[]," * (3 * MIB) + b"0]}\r\n")


def drip(peer: QmpPeer, request: dict[str, Any]) -> None:
    data = json.dumps({"return": {}, "id": request.get("id")}).encode()
    loop = asyncio.get_running_loop()
    for index in range(len(data)):
        loop.call_later(index, lambda index=index: peer.send(data[index : index + 1]))


def late(seconds: float) -> Answer:
    def answer(peer: QmpPeer, request: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_later(seconds, peer.reply, request, {})

    return answer


def reply(**members: object) -> Callable[[Any], bytes]:
    return lambda request_id: json.dumps({"id": request_id, **members}).encode()


MODES: Mapping[str, Answer] = {
    "answers nothing": forget,
    "says yes to everything": value({}),
    "a text": value("\x1b[31m" * 1000),
    "a number beyond all": value(1 << 200),
    "lists of nothing": value([[]] * 1000),
    "objects of wrong types": value([{"cpu-index": "0", "thread-id": None, "props": 7, "type": [], "data": 3}]),
    "very many rows": value([{"cpu-index": 1, "thread-id": 1, "type": "x", "props": {}, "data": {"slot": 1}}] * 700),
    "another request's id": raw(lambda request_id: json.dumps({"return": {}, "id": "other"}).encode()),
    "an id of another type": raw(lambda request_id: json.dumps({"return": {}, "id": [request_id]}).encode()),
    "no id": raw(lambda request_id: json.dumps({"return": {}}).encode()),
    "answers twice": raw(lambda request_id: reply(**{"return": {}})(request_id) + b"\r\n" + reply(x=1)(request_id)),
    "neither result nor error": raw(reply()),
    "errors without words": raw(reply(error={})),
    "errors of a wrong type": raw(reply(error=7)),
    "long errors with control characters": raw(reply(error={"class": "X", "desc": "\x1b[31m\n" * 3000})),
    "another greeting": raw(lambda _id: b'{"QMP": {"version": {}, "capabilities": []}}'),
    "a list": raw(lambda _id: b"[]"),
    "nested too deeply": raw(lambda _id: b'{"return": ' + b"[" * 5000),
    "no JSON": raw(lambda _id: b"}{" * 100),
    "no UTF-8": raw(lambda _id: b'{"return": "\xff\xff"}'),
    "a line without end": raw(lambda _id: b"x" * (4 * MIB)),
    "a line of very many values": many_values,
    "floods with events": flood,
    "drips": drip,
    "slow": late(10),
    "too late": late(1000),
    "hangs up": lambda peer, _request: peer.hang_up(),
}
