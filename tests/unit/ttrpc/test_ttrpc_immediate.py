"""Methods that are answered within the read that brought their request."""

from __future__ import annotations

import asyncio
import socket

import pytest
from ttrpc_peers import RawPeer, code_of, echo, fails_alone, raw_server, request, until

from pyshim.ttrpc.framing import RESPONSE
from pyshim.ttrpc.handlers import CallContext, ImmediateHandler
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import Code
from tests.fakes.served import served


def look(payload: bytes, call: CallContext) -> bytes:
    return payload + call.method.encode()


LOOK = {"demo": {"Look": ImmediateHandler(look), "Echo": echo}}


async def test_it_is_answered_without_a_task() -> None:
    tasks = []

    def which(payload: bytes, call: CallContext) -> bytes:
        tasks.append(asyncio.current_task())
        return payload

    async with served({"demo": {"Look": ImmediateHandler(which)}}) as (_, client):
        assert await client.call("demo", "Look", b"hello", timeout_s=5) == b"hello"
    assert tasks == [None]


async def test_replies_to_requests_that_came_together_leave_together() -> None:
    # Keeps apart what was sent apart.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = Server(services=LOOK)
    serving = asyncio.create_task(server.serve_connection(theirs))
    peer = RawPeer(ours)

    await peer.send(request(1, "Look", b"a") + request(3, "Look", b"b") + request(5, "Nothing"))
    together = await asyncio.get_running_loop().sock_recv(ours, 65536)
    await peer.send(request(7, "Look", b"c"))
    alone = await asyncio.get_running_loop().sock_recv(ours, 65536)

    assert [b"aLook" in together, b"bLook" in together, b"Nothing" in together] == [True, True, True]
    assert alone.endswith(b"cLook")
    peer.close()
    await server.shutdown(0)
    await serving


class Gone(Exception):
    code = Code.NOT_FOUND


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        pytest.param(Gone("container 'c1': no such"), Code.NOT_FOUND, "container 'c1': no such", id="code"),
        pytest.param(ValueError("boom"), Code.INTERNAL, "ValueError: boom", id="no code"),
        pytest.param("text", Code.INTERNAL, "TypeError: method 'demo/Look' returned str, expected bytes", id="text"),
        pytest.param(bytes(5 << 20), Code.RESOURCE_EXHAUSTED, None, id="over the limit"),
    ],
)
async def test_an_error_is_answered_and_the_connection_lives_on(
    outcome: object, code: int, message: str | None
) -> None:
    def fail(payload: bytes, call: CallContext) -> bytes:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[return-value]

    async with served({"demo": {"Look": ImmediateHandler(fail), "Echo": echo}}) as (_, client):
        error = await fails_alone(client, "Look")

    assert error.code == code
    assert message is None or error.message == message


async def test_a_peer_that_does_not_read_is_not_answered_into_memory() -> None:
    asked = 0
    reply = bytes(64 << 10)

    def large(payload: bytes, call: CallContext) -> bytes:
        nonlocal asked
        asked += 1
        return reply

    services = {"demo": {"Look": ImmediateHandler(large)}}
    async with raw_server(services, queue_bytes=2 * len(reply)) as (server, peer):
        await peer.send(b"".join(request(2 * n + 1, "Look") for n in range(100)))
        await until(lambda: asked and len(server._handlers))
        seen = asked

        assert seen < 20  # the queue's, and what the kernel took
        for _ in range(100):
            frame = await peer.frame()
            assert frame is not None
            assert (frame[1], len(frame[3]) > len(reply)) == (RESPONSE, True)
        assert asked == 100
        assert len(server._handlers) == 0


async def test_after_the_connection_is_lost_nothing_is_asked_any_more() -> None:
    asked = 0

    def large(payload: bytes, call: CallContext) -> bytes:
        nonlocal asked
        asked += 1
        return bytes(1 << 20)

    services = {"demo": {"Look": ImmediateHandler(large)}}
    async with raw_server(services, queue_bytes=1) as (server, peer):
        await peer.send(b"".join(request(2 * n + 1, "Look") for n in range(5)))
        await until(lambda: len(server._handlers))
        peer.close()
        await until(lambda: not len(server._handlers))

    assert asked == 1


async def test_a_draining_server_refuses_it() -> None:
    async with raw_server(LOOK) as (server, peer):
        server.draining = True
        await peer.send(request(1, "Look"))
        assert (await code_of(peer))[:2] == (1, Code.UNAVAILABLE)
