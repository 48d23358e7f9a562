"""No byte sequence crashes or hangs an end, ends a connection it need not end, or makes it hold more than the limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ttrpc_peers import RawPeer, echo, frame, raw_server, request

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.connection import ClientConnection, RequestRefused, ServerConnection
from pyshim.ttrpc.framing import DATA, HEADER, REQUEST, RESPONSE
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.session import CallContext
from pyshim.ttrpc.status import TtrpcError
from tests.fakes.clock import run_fast_forward


def run(main: Callable[[], Awaitable[None]]) -> None:
    """`main()` in a loop of each example's own, in which no exception is left over."""

    async def guarded() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        async with asyncio.timeout(30):
            await main()
        assert complaints == []

    run_fast_forward(guarded())


LIMIT = 200
ids = st.sampled_from([0, 1, 2, 3, 5, 7, 9, 11, 0x7FFFFFFF, 0xFFFFFFFF])
flags = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 255])
types = st.sampled_from([REQUEST, RESPONSE, DATA, 0, 4, 255])
frames = st.builds(frame, ids, types, flags, st.binary(max_size=60))
requests = st.builds(
    request,
    ids,
    st.sampled_from(["Echo", "Fail", "Other"]),
    st.binary(max_size=60),
    service=st.sampled_from(["demo", "other"]),
    timeout_ns=st.sampled_from([0, 0, 0, 1, -1, 2**63 - 1, -(2**63)]),
    flags=flags,
)
oversize = st.builds(lambda stream_id, type_: frame(stream_id, type_, 0, bytes(LIMIT + 1)), ids, types)
headers = st.builds(lambda *fields: HEADER.pack(*fields), st.integers(0, 2**32 - 1), ids, types, flags)
sequences = st.lists(st.one_of(frames, requests, oversize, headers, st.binary(max_size=30)), max_size=12).map(b"".join)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at the given places."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(sequences, st.lists(st.integers(0, 10_000), max_size=5))
def test_server_core_takes_any_bytes_in_any_chunks(data: bytes, cuts: list[int]) -> None:
    whole = ServerConnection(max_message_bytes=LIMIT, max_open_streams=3)
    expected = whole.receive_data(data)
    core = ServerConnection(max_message_bytes=LIMIT, max_open_streams=3)
    events = []

    for chunk in chunks(data, cuts):
        events += core.receive_data(chunk)
        assert core.buffered_bytes <= LIMIT + HEADER.size
        assert core.open_streams <= 3

    assert events == expected
    assert all(len(event.reply) < LIMIT for event in events if isinstance(event, RequestRefused))


@given(sequences, st.lists(st.integers(0, 10_000), max_size=5))
def test_client_core_takes_any_bytes_and_reports_each_stream_once(data: bytes, cuts: list[int]) -> None:
    core = ClientConnection(max_message_bytes=LIMIT)
    for _ in range(4):
        core.request("s", "m", b"")
    ended = []

    for chunk in chunks(data, cuts):
        for event in core.receive_data(chunk):
            assert event.stream_id in {1, 3, 5, 7}
            assert not core.is_open(event.stream_id)
            ended.append(event.stream_id)
        assert core.buffered_bytes <= LIMIT + HEADER.size

    assert len(ended) == len(set(ended))
    assert len(ended) + core.open_streams == 4


async def fail(payload: bytes, call: CallContext) -> bytes:
    raise TtrpcError(5, "gone")


SERVICES = {"demo": {"Echo": echo, "Fail": fail}}
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(sequences)
def test_server_survives_any_bytes_and_serves_others(data: bytes) -> None:
    async def main() -> None:
        server = Server(services=SERVICES, max_message_bytes=LIMIT, max_in_flight=5)
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(server.serve_connection(theirs))
        peer = RawPeer(ours)
        await peer.send(data)
        peer.close()
        await serving

        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(server.serve_connection(theirs))
        client = Client(ours)
        assert await client.call("demo", "Echo", b"alive", timeout_s=None) == b"alive"
        client.close()
        await server.shutdown(1)
        assert (server.connections, len(server._handlers)) == (0, 0)
        await serving

    run(main)


@slow
@given(st.lists(st.one_of(frames, requests, oversize), max_size=12).map(b"".join))
def test_server_keeps_the_connection_after_any_whole_frames(data: bytes) -> None:
    async def main() -> None:
        # Ids up to the highest are in the sequence, so only a refusal can answer: but it must answer.
        async with raw_server(SERVICES, max_message_bytes=LIMIT, max_in_flight=5) as (_, peer):
            await peer.send(data + request(2))
            while True:
                received = await peer.frame()
                assert received is not None
                if received[0] == 2 and received[1] == RESPONSE:
                    break

    run(main)


@slow
@given(sequences)
def test_client_survives_any_bytes_and_every_call_ends(data: bytes) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        client = Client(ours, max_message_bytes=LIMIT)
        peer = RawPeer(theirs)
        calls = [asyncio.create_task(client.call("demo", "Echo", b"", timeout_s=None)) for _ in range(3)]
        await peer.frame()
        await peer.send(data)
        peer.close()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, bytes | TtrpcError)
        assert client._calls == {}
        await client.closed()

    run(main)
