"""Bytes recorded between this package and the Go implementation (containerd 1.6.20, ttrpc 1.1), both ways round.

Recorded by a relay between the two ends: `ctr shim` as client of our server, our client at containerd's events service.
"""

from __future__ import annotations

import asyncio

import pytest
from ttrpc_peers import raw_server

from protos.containerd import task_v2_pb2
from pyshim.ttrpc.connection import ClientConnection, RequestReceived, ResponseReceived, ServerConnection
from pyshim.ttrpc.session import CallContext
from pyshim.ttrpc.status import Code, TtrpcError

TASK = "containerd.task.v2.Task"
EVENTS = "containerd.services.events.ttrpc.v1.Events"

GO_STATE_REQUEST = bytes.fromhex(
    "0000002c0000000101000a17636f6e7461696e6572642e7461736b2e76322e5461736b120553746174651a0a0a087474727063666f6f"
)
GO_DELETE_REQUEST = bytes.fromhex(
    "000000210000000101000a17636f6e7461696e6572642e7461736b2e76322e5461736b120644656c657465"
)
STATE_REPLY = bytes.fromhex("0000001500000001020012130a087474727063666f6f12022f6218e7242002")
DELETE_REPLY = bytes.fromhex("0000001c0000000102000a1a0805121670726f63657373202778273a206e6f7420666f756e64")

OUR_UNKNOWN_SERVICE = bytes.fromhex("000000110000000101000a066e6f626f64791201582080e497d012")
GO_UNKNOWN_SERVICE = bytes.fromhex("000000140000000102000a12080c120e73657276696365206e6f626f6479")
GO_UNKNOWN_METHOD = bytes.fromhex("000000110000000302000a0f080c120b6d6574686f64204e6f7065")
GO_EMPTY_SUCCESS = bytes.fromhex("00000000000000050200")


@pytest.mark.parametrize(
    ("data", "method", "payload"),
    [
        pytest.param(GO_STATE_REQUEST, "State", b"\x0a\x08ttrpcfoo", id="State"),
        pytest.param(GO_DELETE_REQUEST, "Delete", b"", id="Delete"),
    ],
)
def test_requests_of_the_go_client(data: bytes, method: str, payload: bytes) -> None:
    for cut in range(len(data) + 1):
        core = ServerConnection()
        events = core.receive_data(data[:cut]) + core.receive_data(data[cut:])
        assert events == [RequestReceived(1, TASK, method, payload)]


def test_replies_of_the_go_server() -> None:
    data = GO_UNKNOWN_SERVICE + GO_UNKNOWN_METHOD + GO_EMPTY_SUCCESS

    for cut in range(len(data) + 1):
        core = ClientConnection()
        for method in ("X", "Nope", "Forward"):
            core.request(EVENTS, method, b"")
        assert core.receive_data(data[:cut]) + core.receive_data(data[cut:]) == [
            ResponseReceived(1, b"", Code.UNIMPLEMENTED, "service nobody"),
            ResponseReceived(3, b"", Code.UNIMPLEMENTED, "method Nope"),
            ResponseReceived(5, b""),
        ]


def test_our_request_is_the_one_the_go_server_took() -> None:
    assert ClientConnection().request("nobody", "X", b"", timeout_ns=5 * 10**9) == (1, OUR_UNKNOWN_SERVICE)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        pytest.param(GO_STATE_REQUEST, STATE_REPLY, id="State"),
        pytest.param(GO_DELETE_REQUEST, DELETE_REPLY, id="Delete"),
    ],
)
async def test_our_server_still_answers_the_go_client_with_the_recorded_bytes(sent: bytes, expected: bytes) -> None:
    async def state(payload: bytes, call: CallContext) -> bytes:
        request = task_v2_pb2.StateRequest.FromString(payload)
        return task_v2_pb2.StateResponse(id=request.id, bundle="/b", pid=4711, status=2).SerializeToString()

    async def delete(payload: bytes, call: CallContext) -> bytes:
        raise TtrpcError(Code.NOT_FOUND, "process 'x': not found")

    async with raw_server({TASK: {"State": state, "Delete": delete}}) as (_, peer):
        await peer.send(sent)
        received = b""
        while len(received) < len(expected):
            received += await asyncio.get_running_loop().sock_recv(peer.sock, 4096)

    assert received == expected
