"""Both ends of a connection for the tests of this folder: real ones, or a bare socket in place of one; and frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.connection import Event, RequestRefused
from pyshim.ttrpc.envelope_pb2 import Request
from pyshim.ttrpc.framing import HEADER, REQUEST, RESPONSE, FrameReader
from pyshim.ttrpc.messages import decode_request, decode_response, encode_request
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.session import CallContext, Handler
from pyshim.ttrpc.status import RemoteError

_Result = TypeVar("_Result")


async def until(holds: Callable[[], object]) -> None:
    """`holds()` is true. For what nothing announces; the test's own limit ends it."""
    tick = asyncio.Event()
    while not holds():
        asyncio.get_running_loop().call_later(0.001, tick.set)
        await tick.wait()
        tick.clear()


@asynccontextmanager
async def raw_server(
    services: Mapping[str, Mapping[str, Handler]], **options: Any
) -> AsyncIterator[tuple[Server, RawPeer]]:
    """A server and the bare other end of its connection."""
    server = Server(services=services, **options)
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(server.serve_connection(theirs))
    peer = RawPeer(ours)
    try:
        yield server, peer
    finally:
        peer.close()
        await server.shutdown(0)
        await serving


@asynccontextmanager
async def raw_client(**options: Any) -> AsyncIterator[tuple[Client, RawPeer]]:
    """A client and the bare other end of its connection."""
    ours, theirs = socket.socketpair()
    client = Client(ours, **options)
    peer = RawPeer(theirs)
    try:
        yield client, peer
    finally:
        client.close()
        peer.close()


class RawPeer:
    """A socket that sends what the test says and cuts what it receives into frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader(64 << 20)
        self._frames: list[tuple[int, int, int, bytes]] = []

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def frame(self) -> tuple[int, int, int, bytes] | None:
        """(stream id, type, flags, payload) of the next frame; None at the end of the stream."""
        while not self._frames:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += [(f.stream_id, f.type, f.flags, bytes(f.payload)) for f in self._reader.feed(data)]
        return self._frames.pop(0)

    def close(self) -> None:
        self.sock.close()


def frame(stream_id: int, type_: int, flags: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), stream_id, type_, flags) + payload


def request(
    stream_id: int,
    method: str = "Echo",
    payload: bytes = b"",
    *,
    service: str = "demo",
    timeout_ns: int = 0,
    flags: int = 0,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """A request frame."""
    return frame(stream_id, REQUEST, flags, b"".join(encode_request(service, method, payload, timeout_ns, metadata)))


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


async def echo(payload: bytes, call: CallContext) -> bytes:
    return payload


DEMO = {"demo": {"Echo": echo}}


async def fails_alone(client: Client, method: str) -> RemoteError:
    """The error of a call of `method`; the connection lives on."""
    with pytest.raises(RemoteError) as caught:
        await client.call("demo", method, b"", timeout_s=None)
    assert await client.call("demo", "Echo", b"alive", timeout_s=None) == b"alive"
    return caught.value


async def code_of(peer: RawPeer) -> tuple[int, int, str]:
    """(stream id, code, message) of the peer's next response."""
    received = await peer.frame()
    assert received is not None
    stream_id, type_, _flags, payload = received
    assert type_ == RESPONSE
    reply = decode_response(payload)
    return stream_id, reply.code, reply.message


def only(events: list[Event]) -> Event:
    assert len(events) == 1
    return events[0]


def refusal(events: list[Event]) -> tuple[int, int, str]:
    """(stream id, code, message) of the only event, after checking that its reply frame says the same."""
    event = only(events)
    assert isinstance(event, RequestRefused)
    length, stream_id, type_, flags = HEADER.unpack_from(event.reply)
    reply = decode_response(event.reply[10:])
    assert (length, stream_id, type_, flags) == (len(event.reply) - 10, event.stream_id, RESPONSE, 0)
    assert (reply.code, reply.message) == (event.code, event.message)
    return event.stream_id, event.code, event.message


async def request_of(peer: RawPeer) -> tuple[int, Request]:
    """(stream id, request) of the next frame."""
    received = await peer.frame()
    assert received is not None
    assert received[1] == REQUEST
    return received[0], decode_request(received[3])


def calling(client: Client, payload: bytes = b"", timeout_s: float | None = None) -> asyncio.Task[bytes]:
    return asyncio.create_task(client.call("demo", "Get", payload, timeout_s=timeout_s))
