"""A virtio-serial port as the guest agent's transport, on a pseudo terminal: without its other side it reads as ended
and polls as hung up, as a port without a host does.
"""

from __future__ import annotations

import asyncio
import os
import tty
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from guest.agent import transport
from guest.agent.errors import InvalidArgument
from pyshim.ttrpc import CallContext, RemoteError, Server
from pyshim.ttrpc.connection import ClientConnection, ResponseReceived


async def echo(payload: bytes, _context: CallContext) -> bytes:
    return payload


class Host:
    """The other side of the port, on an open terminal."""

    def __init__(self, node: str) -> None:
        self.fd = os.open(node, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        tty.setraw(self.fd)
        self._core = ClientConnection()

    async def call(self, payload: bytes) -> bytes:
        """The reply of `echo`; what the port does not take at once is written as it goes."""
        loop = asyncio.get_running_loop()
        stream_id, frame = self._core.request("demo.Echo", "Echo", payload)
        rest = memoryview(frame)
        while True:
            with suppress(BlockingIOError):
                rest = rest[os.write(self.fd, rest) :] if rest else rest
            try:
                events = self._core.receive_data(os.read(self.fd, 4096))
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_reader(self.fd, ready.set)
                loop.call_later(0.001, ready.set)  # room to write is not waited for
                await ready.wait()
                loop.remove_reader(self.fd)
                continue
            for event in events:
                assert isinstance(event, ResponseReceived)
                assert event.stream_id == stream_id
                if event.code:
                    raise RemoteError(event.code, event.message)
                return event.payload

    def close(self) -> None:
        os.close(self.fd)


@asynccontextmanager
async def served_port() -> AsyncIterator[str]:
    """The node of a terminal whose master is a port that is served."""
    master, slave = os.openpty()
    node = os.ttyname(slave)
    tty.setraw(slave)
    os.close(slave)
    server = Server(services={"demo.Echo": {"Echo": echo}})
    serving = asyncio.create_task(transport.serve_port(server, transport.Port(master)))
    try:
        yield node
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await server.shutdown(0)
        os.close(master)


async def test_a_host_is_served_however_late_it_comes_and_the_next_one_too() -> None:
    async with served_port() as node:
        for number in range(3):
            await asyncio.sleep(0.05)
            host = Host(node)
            assert await host.call(b"%d" % number * 100_000) == b"%d" % number * 100_000
            assert await host.call(b"again") == b"again"
            host.close()


async def test_a_port_without_a_host_costs_no_turns_of_the_loop() -> None:
    async with served_port() as node:
        Host(node).close()
        await asyncio.sleep(0.05)
        before = os.times()
        await asyncio.sleep(0.5)
        after = os.times()

    assert after.user + after.system - before.user - before.system < 0.1


async def test_a_host_that_leaves_half_a_request_and_takes_no_replies_does_not_spoil_the_next_ones() -> None:
    async with served_port() as node:
        host = Host(node)
        _, frame = ClientConnection().request("demo.Echo", "Echo", b"x" * 3000)
        os.write(host.fd, frame + frame[:100])
        await asyncio.sleep(0.05)
        host.close()
        await asyncio.sleep(0.05)
        host = Host(node)
        while True:  # the terminal keeps the reply that was not taken; a virtio-serial port throws it away
            try:
                os.read(host.fd, 4096)
            except BlockingIOError:
                break
        assert await host.call(b"mine") == b"mine"
        host.close()


@pytest.mark.parametrize("address", ["", "tcp://1.2.3.4:5", "serial://", "vsock://x:1", "vsock://-1", "/run/a.sock"])
def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="listen on"):
        asyncio.run(transport.serve(Server(services={}), address))
