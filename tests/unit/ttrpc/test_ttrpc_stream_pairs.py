"""The asyncio client over a pair of asyncio streams instead of a socket of its own."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from ttrpc_peers import RawPeer, calling, echo, frame, request_of, run

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.framing import RESPONSE
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import OutcomeUnknown, RemoteError


def test_client_and_server_work_over_stream_pairs() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        server = Server(services={"demo": {"Get": echo}})
        serving = asyncio.create_task(server.serve_streams(*await asyncio.open_connection(sock=theirs)))
        client = await Client.from_streams(*await asyncio.open_connection(sock=ours))
        payload = os.urandom(3 << 20)
        assert await client.call("demo", "Get", payload, timeout_s=None) == payload
        replies = await asyncio.gather(*(calling(client, b"%d" % n) for n in range(100)))
        assert replies == [b"%d" % n for n in range(100)]
        with pytest.raises(RemoteError):
            await client.call("demo", "Nothing", b"", timeout_s=None)
        await server.shutdown(1)
        await client.closed()
        await serving

    run(main)


def test_stream_pair_that_ends_fails_its_calls() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        client = await Client.from_streams(*await asyncio.open_connection(sock=ours))
        peer = RawPeer(theirs)
        call = calling(client)
        await request_of(peer)
        peer.close()
        with pytest.raises(OutcomeUnknown):
            await call
        client.close()

    run(main)


def test_stream_pair_sends_no_more_than_its_queue_takes() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        client = await Client.from_streams(*await asyncio.open_connection(sock=ours), queue_bytes=100_000)
        peer = RawPeer(theirs)
        calls = [calling(client, bytes(50_000)) for _ in range(60)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert client._link.queued_bytes <= 151_000
        ids = [(await request_of(peer))[0] for _ in calls]
        await peer.send(b"".join(frame(n, RESPONSE, 0) for n in ids))
        await asyncio.gather(*calls)
        client.close()
        peer.close()

    run(main)
