"""The asyncio server limits a peer's requests: sizes, numbers, bytes in flight."""

from __future__ import annotations

import asyncio
import socket

import pytest
from ttrpc_peers import DEMO, code_of, echo, raw_server, request

from pyshim.ttrpc.framing import RESPONSE
from pyshim.ttrpc.handlers import CallContext
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import Code, RemoteError
from tests.fakes.served import served


async def test_reply_over_the_limit_is_exhausted_and_the_connection_lives_on() -> None:
    async def huge(payload: bytes, call: CallContext) -> bytes:
        return bytes(5 << 20)

    async with served({"demo": {"Huge": huge, "Echo": echo}}) as (_, client):
        with pytest.raises(RemoteError) as caught:
            await client.call("demo", "Huge", b"", timeout_s=None)
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
        assert await client.call("demo", "Echo", b"ok", timeout_s=None) == b"ok"


async def test_requests_beyond_the_bound_are_exhausted_while_others_wait() -> None:
    go = asyncio.Event()

    async def wait(payload: bytes, call: CallContext) -> bytes:
        await go.wait()
        return b""

    async with raw_server({"demo": {"Wait": wait, "Echo": echo}}, max_in_flight=3) as (server, peer):
        await peer.send(b"".join(request(n, "Wait") for n in (1, 3, 5, 7)))
        assert (await code_of(peer))[:2] == (7, Code.RESOURCE_EXHAUSTED)
        assert len(server._handlers) == 3
        go.set()
        assert {(await code_of(peer))[:2] for _ in range(3)} == {(1, 0), (3, 0), (5, 0)}
        await peer.send(request(9))
        assert await peer.frame() == (9, RESPONSE, 0, b"")


async def test_handlers_past_their_deadline_still_count_as_in_flight() -> None:
    go = asyncio.Event()

    async def wait(payload: bytes, call: CallContext) -> bytes:
        await go.wait()
        return b""

    async with raw_server({"demo": {"Wait": wait}}, max_in_flight=1) as (_, peer):
        await peer.send(request(1, "Wait", timeout_ns=1))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        await peer.send(request(3, "Wait"))
        assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
        go.set()


async def test_request_bytes_in_flight_are_bounded() -> None:
    go = asyncio.Event()

    async def wait(payload: bytes, call: CallContext) -> bytes:
        await go.wait()
        return b""

    async with raw_server({"demo": {"Wait": wait}}, max_in_flight_bytes=1000) as (_, peer):
        await peer.send(request(1, "Wait", bytes(600)) + request(3, "Wait", bytes(600)))
        assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
        go.set()
        assert (await code_of(peer))[:2] == (1, 0)
        # Ended calls do not count; one request alone may always be as large as a message.
        go.clear()
        await peer.send(request(5, "Wait", bytes(500)) + request(7, "Wait", bytes(400)) + request(9, "Other"))
        assert (await code_of(peer))[0] == 9
        go.set()
        assert {(await code_of(peer))[:2] for _ in range(2)} == {(5, 0), (7, 0)}
        await peer.send(request(11, "Wait", bytes(2000)))
        assert (await code_of(peer))[:2] == (11, 0)


async def test_peer_that_does_not_read_is_not_read_from_and_costs_bounded_memory() -> None:
    reply = bytes(64 << 10)

    started = 0

    async def large(payload: bytes, call: CallContext) -> bytes:
        nonlocal started
        started += 1
        return reply

    services = {"demo": {"Large": large}}
    async with raw_server(services, queue_bytes=256 << 10, max_in_flight=50) as (server, peer):
        asked = 0
        try:
            async with asyncio.timeout(0.5):
                while True:
                    await peer.send(request(2 * asked + 1, "Large", bytes(4096)))
                    asked += 1
        except TimeoutError:
            pass
        session = next(iter(server._sessions))
        assert session._link.queued_bytes <= (256 << 10) + len(reply) + 100 * 100
        assert len(server._handlers) <= 50
        stalled_at = started
        assert stalled_at < asked
        answered = 0
        async with asyncio.timeout(20):
            while answered < stalled_at:
                received = await peer.frame()
                assert received is not None
                answered += 1


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    server = Server(services=DEMO, max_connections=2)
    pairs = [socket.socketpair() for _ in range(3)]
    tasks = [asyncio.ensure_future(server.serve_connection(theirs)) for _, theirs in pairs]
    await asyncio.sleep(0)
    assert server.connections == 2
    assert pairs[2][0].recv(1) == b""
    pairs[0][0].close()
    await tasks[0]
    again, theirs = socket.socketpair()
    tasks.append(asyncio.ensure_future(server.serve_connection(theirs)))
    await asyncio.sleep(0)
    assert server.connections == 2
    for ours in (pairs[1][0], pairs[2][0], again):
        ours.close()
    await asyncio.gather(*tasks)
