"""The asyncio server's listener and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest
from ttrpc_peers import DEMO, echo, raw_server, request, until

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.handlers import CallContext
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import Code, OutcomeUnknown, RemoteError
from tests.fakes.served import served


async def test_shutdown_lets_calls_finish_and_sends_their_replies_before_closing() -> None:
    go, entered = asyncio.Event(), asyncio.Event()

    async def slow(payload: bytes, call: CallContext) -> bytes:
        entered.set()
        await go.wait()
        return bytes(3 << 20)

    server = Server(services={"demo": {"Slow": slow, "Echo": echo}})
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(server.serve_connection(theirs))
    client = Client(ours)
    call = asyncio.create_task(client.call("demo", "Slow", b"", timeout_s=None))
    await entered.wait()

    stopping = asyncio.create_task(server.shutdown(grace_s=10))
    await asyncio.sleep(0)
    with pytest.raises(RemoteError) as caught:
        await client.call("demo", "Echo", b"", timeout_s=None)
    go.set()

    assert await call == bytes(3 << 20)
    assert caught.value.code == Code.UNAVAILABLE
    await stopping
    await serving
    await client.closed()
    assert (server.connections, len(server._handlers)) == (0, 0)


async def test_shutdown_cancels_what_outlives_the_grace_and_answers_it() -> None:
    entered = asyncio.Event()

    async def forever(payload: bytes, call: CallContext) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    async with served({"demo": {"Forever": forever}}) as (server, client):
        call = asyncio.create_task(client.call("demo", "Forever", b"", timeout_s=None))
        await entered.wait()
        await server.shutdown(0.01)
        with pytest.raises(RemoteError) as caught:
            await call
        assert caught.value.code == Code.CANCELLED
        assert len(server._handlers) == 0


async def test_shutdown_does_not_wait_long_for_a_peer_that_does_not_read() -> None:
    entered = asyncio.Event()

    async def large(payload: bytes, call: CallContext) -> bytes:
        entered.set()
        return bytes(4_000_000)

    async with raw_server({"demo": {"Large": large}}) as (server, peer):
        await peer.send(request(1, "Large"))
        await entered.wait()
        await server.shutdown(5)
        assert server.connections == 0


async def test_shutdown_from_a_handler_is_refused() -> None:
    async def stop(payload: bytes, call: CallContext) -> bytes:
        await server.shutdown(1)
        return b""

    async with served({"demo": {"Stop": stop}}) as (server, client):
        with pytest.raises(RemoteError, match="called by one of its handlers"):
            await client.call("demo", "Stop", b"", timeout_s=None)
        assert not server.draining


async def connected(path: Path) -> Client:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except OSError:
        sock.close()
        raise
    return Client(sock)


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


async def test_listener_serves_many_connections_until_shutdown(tmp_path: Path) -> None:
    server = Server(services=DEMO)
    listener = listening(tmp_path / "s")
    serving = asyncio.create_task(server.serve(listener))
    clients = [await connected(tmp_path / "s") for _ in range(20)]
    replies = await asyncio.gather(*(c.call("demo", "Echo", b"x", timeout_s=None) for c in clients))
    assert replies == [b"x"] * 20
    assert server.connections == 20

    await server.shutdown(1)
    await serving

    assert listener.fileno() == -1
    for client in clients:
        await client.closed()


async def test_cancelling_serve_closes_the_listener_and_keeps_connections(tmp_path: Path) -> None:
    server = Server(services=DEMO)
    serving = asyncio.create_task(server.serve(listening(tmp_path / "s")))
    client = await connected(tmp_path / "s")
    await client.call("demo", "Echo", b"", timeout_s=None)

    serving.cancel()
    await asyncio.wait([serving])

    with pytest.raises(ConnectionRefusedError):
        await connected(tmp_path / "s")
    assert await client.call("demo", "Echo", b"x", timeout_s=None) == b"x"
    client.close()
    await server.shutdown(0)


async def test_peer_that_is_not_authorized_is_closed_before_it_is_heard(tmp_path: Path) -> None:
    called = 0
    turned_away = True

    def authorize(sock: socket.socket) -> None:
        if turned_away:
            raise PermissionError("uid 5 is not welcome")

    async def count(payload: bytes, call: CallContext) -> bytes:
        nonlocal called
        called += 1
        return b""

    server = Server(services={"demo": {"Count": count}}, authorize=authorize)
    serving = asyncio.create_task(server.serve(listening(tmp_path / "s")))
    client = await connected(tmp_path / "s")
    with pytest.raises(OutcomeUnknown):
        await client.call("demo", "Count", b"", timeout_s=None)
    assert called == 0
    turned_away = False
    client = await connected(tmp_path / "s")
    await client.call("demo", "Count", b"", timeout_s=None)
    client.close()
    await server.shutdown(0)
    await serving


async def test_accepting_survives_running_out_of_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import resource

    with caplog.at_level(logging.ERROR):
        server = Server(services=DEMO)
        serving = asyncio.create_task(server.serve(listening(tmp_path / "s")))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        in_use = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, hard))
        hogs = []
        try:
            while True:
                hogs.append(os.dup(0))
        except OSError:
            pass
        try:
            waiting.connect(str(tmp_path / "s"))
            await until(lambda: "accept paused" in caplog.text)
        finally:
            for fd in hogs:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client = Client(waiting)
        assert await client.call("demo", "Echo", b"x", timeout_s=None) == b"x"
        client.close()
        await server.shutdown(0)
        await serving
