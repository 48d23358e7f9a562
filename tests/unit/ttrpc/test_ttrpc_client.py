"""The asyncio client: what a caller learns when the peer is slow, wrong or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ttrpc_peers import calling, echo, frame, raw_client, request_of

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.connection import MAX_STRAY_FRAMES
from pyshim.ttrpc.framing import DATA, MAX_MESSAGE_BYTES, REQUEST, RESPONSE
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import (
    CallTimedOut,
    Code,
    ConnectionClosed,
    MessageTooLarge,
    OutcomeUnknown,
    RemoteError,
    RemoteProtocolError,
    TtrpcError,
)
from tests.fakes.open_files import same_open_files
from tests.fakes.served import served


async def test_request_carries_timeout_and_metadata() -> None:
    async with raw_client() as (client, peer):
        call = asyncio.create_task(client.call("s.S", "M", b"p", timeout_s=2.5, metadata=[("k", "v")]))
        stream_id, request = await request_of(peer)
        assert (stream_id, request.service, request.method, request.payload) == (1, "s.S", "M", b"p")
        assert request.timeout_nano == 2_500_000_000
        assert [(pair.key, pair.value) for pair in request.metadata] == [("k", "v")]
        await peer.send(frame(1, RESPONSE, 0, b"\x12\x02ok"))
        assert await call == b"ok"


@pytest.mark.parametrize("timeout_s", [None, 1e18, float("inf")])
async def test_no_timeout_is_sent_as_none(timeout_s: float | None) -> None:
    async with raw_client() as (client, peer):
        call = calling(client, timeout_s=timeout_s)
        assert (await request_of(peer))[1].timeout_nano == 0
        await peer.send(frame(1, RESPONSE, 0))
        assert await call == b""


async def test_remote_error_carries_code_and_text() -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await peer.send(frame(1, RESPONSE, 0, bytes.fromhex("0a0d 0805 1204676f6e65 1a030a0174")))
        with pytest.raises(RemoteError) as caught:
            await call
        assert (caught.value.code, str(caught.value)) == (Code.NOT_FOUND, "gone")


async def test_code_without_a_name_is_kept() -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await peer.send(frame(1, RESPONSE, 0, bytes.fromhex("0a02 084d")))
        with pytest.raises(RemoteError) as caught:
            await call
        assert caught.value.code == 77


async def test_timed_out_call_is_forgotten_and_its_late_reply_dropped() -> None:
    async with raw_client() as (client, peer):
        with pytest.raises(CallTimedOut) as caught:
            await client.call("demo", "Get", b"", timeout_s=0.01)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        second = calling(client)
        await peer.send(frame(1, RESPONSE, 0, b"\x12\x04late") + frame(3, RESPONSE, 0, b"\x12\x02ok"))
        assert await second == b"ok"
        assert (client._core.late_frames, client._core.ignored_frames) == (1, 1)
        assert client._calls == {}


@pytest.mark.parametrize("timeout_s", [0, -1, 1e-12])
async def test_timeout_that_passed_already_is_a_timeout(timeout_s: float) -> None:
    async with raw_client() as (client, _):
        with pytest.raises(CallTimedOut):
            await client.call("demo", "Get", b"", timeout_s=timeout_s)
        assert not client.is_closed


async def test_cancelled_call_leaves_nothing_behind() -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await request_of(peer)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (client._calls, client._core.open_streams) == ({}, 0)


async def test_dropped_connection_leaves_the_outcome_unknown() -> None:
    async with raw_client() as (client, peer):
        calls = [calling(client) for _ in range(5)]
        for _ in calls:
            await request_of(peer)
        peer.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [OutcomeUnknown] * 5
        await client.closed()
        assert client.is_closed


async def test_call_on_a_closed_connection_was_not_carried_out() -> None:
    async with raw_client() as (client, peer):
        peer.close()
        await client.closed()
        with pytest.raises(ConnectionClosed) as caught:
            await client.call("demo", "Get", b"", timeout_s=1)
        assert type(caught.value) is ConnectionClosed


async def test_request_that_never_left_whole_was_not_carried_out() -> None:
    async with raw_client(queue_bytes=64 << 20) as (client, peer):
        sent = calling(client)
        stuck = calling(client, bytes(4 << 20)[:-100])
        queued = calling(client)
        await request_of(peer)
        peer.close()
        results = await asyncio.gather(sent, stuck, queued, return_exceptions=True)
        assert [type(result) for result in results] == [OutcomeUnknown, ConnectionClosed, ConnectionClosed]


async def test_reply_that_arrived_before_the_connection_broke_counts() -> None:
    async with raw_client() as (client, peer):
        first = calling(client)
        await request_of(peer)
        # No turn of the loop between these and the write that fails: the reply is still unread then.
        peer.sock.send(frame(1, RESPONSE, 0, b"\x12\x02ok"))
        peer.close()
        with pytest.raises(ConnectionClosed):
            await client.call("demo", "Get", b"", timeout_s=None)
        assert await first == b"ok"
        assert isinstance(client.close_error, BrokenPipeError)


async def test_close_fails_calls_and_may_be_repeated() -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await request_of(peer)
        client.close()
        client.close()
        with pytest.raises(OutcomeUnknown):
            await call
        assert await peer.frame() is None
        assert client.close_error is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        pytest.param(frame(1, RESPONSE, 0, b"\xff"), RemoteProtocolError, id="malformed"),
        pytest.param(frame(1, RESPONSE, 0, bytes(5 << 20)), MessageTooLarge, id="five megabytes"),
        pytest.param(frame(1, DATA, 0, b"x"), RemoteProtocolError, id="data frame"),
    ],
)
async def test_unusable_reply_fails_one_call_and_the_connection_lives_on(reply: bytes, error: type[TtrpcError]) -> None:
    async with raw_client() as (client, peer):
        first, second = calling(client), calling(client)
        await peer.send(reply)
        with pytest.raises(error):
            await first
        await peer.send(frame(3, RESPONSE, 0, b"\x12\x02ok"))
        assert await second == b"ok"


@pytest.mark.parametrize("stray", [frame(99, RESPONSE, 0), frame(1, 200, 0, b"?"), frame(0, REQUEST, 0)], ids=range(3))
async def test_a_server_that_floods_with_frames_that_answer_nothing_is_disconnected(stray: bytes) -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await peer.send(stray * MAX_STRAY_FRAMES)
        await asyncio.sleep(0)
        assert not client.is_closed
        await peer.send(stray * 2)
        with pytest.raises(OutcomeUnknown, match="frames answer no call"):
            await call
        assert client.is_closed


async def test_request_over_the_limit_is_refused_here() -> None:
    async with raw_client() as (client, peer):
        with pytest.raises(MessageTooLarge):
            await client.call("demo", "Get", bytes(MAX_MESSAGE_BYTES), timeout_s=1)
        call = calling(client)
        assert (await request_of(peer))[0] == 1
        await peer.send(frame(1, RESPONSE, 0))
        await call


async def test_calls_wait_while_the_peer_does_not_read_and_stay_in_order() -> None:
    async with raw_client(queue_bytes=100_000) as (client, peer):
        calls = [calling(client, bytes(50_000)) for _ in range(60)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert client._link.queued_bytes <= 151_000
        ids = [(await request_of(peer))[0] for _ in calls]
        assert ids == list(range(1, 121, 2))
        await peer.send(b"".join(frame(n, RESPONSE, 0) for n in ids))
        await asyncio.gather(*calls)


async def test_timeout_counts_while_a_call_waits_for_room() -> None:
    async with raw_client(queue_bytes=1000) as (client, _):
        stuck = calling(client, bytes(4_000_000))
        with pytest.raises(CallTimedOut):
            await client.call("demo", "Get", b"", timeout_s=0.01)
        client.close()
        with pytest.raises(ConnectionClosed):
            await stuck


async def test_cancelling_one_waiting_call_lets_the_next_through() -> None:
    async with raw_client(queue_bytes=1000) as (client, peer):
        stuck = calling(client, bytes(4_000_000))
        waiting = [calling(client, b"%d" % n) for n in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        assert (await request_of(peer))[0] == 1
        stream_id, request = await request_of(peer)
        assert (stream_id, request.payload) == (3, b"2")
        await peer.send(frame(1, RESPONSE, 0) + frame(3, RESPONSE, 0))
        await asyncio.gather(stuck, waiting[2])


async def test_no_half_close_is_needed_or_made() -> None:
    async with raw_client() as (client, peer):
        call = calling(client)
        await request_of(peer)
        peer.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.sock.recv(1)
        await peer.send(frame(1, RESPONSE, 0))
        await call
        with pytest.raises(BlockingIOError):
            peer.sock.recv(1)


async def test_leaving_the_context_closes_the_client() -> None:
    async with raw_client() as (client, _):
        async with client:
            pass
        assert client.is_closed


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda client, server: client.close(), id="client closes"),
        pytest.param(lambda client, server: next(iter(server._sessions)).close(), id="server closes"),
    ],
)
async def test_no_descriptor_and_no_task_is_left(end: Callable[[Client, Server], None]) -> None:
    tasks = len(asyncio.all_tasks())
    with same_open_files():
        async with served({"demo": {"Get": echo}}) as (server, client):
            await calling(client)
            end(client, server)
            await client.closed()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == tasks
