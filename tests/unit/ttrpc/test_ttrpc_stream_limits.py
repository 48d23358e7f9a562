"""Streams with more or larger messages than somebody takes: who is held back, and what is lost."""

from __future__ import annotations

import asyncio

import pytest
from demo_streams import SERVICES
from ttrpc_peers import END, frame, raw_client, raw_server, request, run, served

from pyshim.ttrpc.framing import DATA, FLAG_REMOTE_OPEN, HEADER, RESPONSE
from pyshim.ttrpc.handlers import CallContext, ServerStream, StreamHandler
from pyshim.ttrpc.inbox import INBOX_MESSAGES, Inbox
from pyshim.ttrpc.messages import decode_response
from pyshim.ttrpc.status import Code, RemoteError, RemoteProtocolError, TtrpcError


def test_oversize_message_ends_its_stream_for_the_handler_too() -> None:
    async def main() -> None:
        errors: list[TtrpcError] = []
        seen = asyncio.Event()

        async def wait(stream: ServerStream, call: CallContext) -> None:
            try:
                await stream.recv()
            except TtrpcError as exc:
                errors.append(exc)
            seen.set()

        services = {"demo": {"Wait": StreamHandler(wait, client_streams=True, server_streams=True)}}
        async with raw_server(services) as (_, peer):
            await peer.send(request(1, "Wait", flags=FLAG_REMOTE_OPEN) + HEADER.pack(5 << 20, 1, DATA, 0))
            received = await peer.frame()
            assert received is not None
            assert decode_response(received[3]).code == Code.RESOURCE_EXHAUSTED
            await seen.wait()
            assert [type(error) for error in errors] == [RemoteProtocolError]

    run(main)


def test_slow_handler_holds_the_client_back_and_loses_nothing() -> None:
    async def main() -> None:
        go = asyncio.Event()
        sent = 0

        async def late(stream: ServerStream, call: CallContext) -> bytes:
            await go.wait()
            return b"%d" % sum([len(message) async for message in stream])

        async def send_all() -> None:
            nonlocal sent
            for _ in range(2000):
                await peer.send(frame(1, DATA, 0, bytes(1000)))
                sent += 1
            await peer.send(frame(1, DATA, END))

        services = {"demo": {"Late": StreamHandler(late, client_streams=True, server_streams=False)}}
        async with raw_server(services, stall_grace_s=60) as (server, peer):
            await peer.send(request(1, "Late", flags=FLAG_REMOTE_OPEN))
            sending = asyncio.create_task(send_all())
            await asyncio.wait([sending], timeout=0.3)
            inbox = next(iter(next(iter(server._sessions))._calls.values())).inbox
            assert inbox is not None
            # At most one read of 64 KiB is on its way when the inbox fills.
            assert INBOX_MESSAGES <= len(inbox._messages) <= INBOX_MESSAGES + 66
            assert sent < 2000
            go.set()
            assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x072000000")
            await sending

    run(main)


def test_stream_that_is_never_read_fails_and_the_connection_lives_on() -> None:
    async def main() -> None:
        async def deaf(stream: ServerStream, call: CallContext) -> None:
            await asyncio.Event().wait()

        deaf_method = StreamHandler(deaf, client_streams=True, server_streams=True, cancel_on_timeout=True)
        async with served(
            {"demo": {"Deaf": deaf_method, "Double": SERVICES["demo"]["Double"]}}, stall_grace_s=0.05
        ) as (_, client):
            method = client.stream("demo", "Deaf", client_streams=True, server_streams=True)
            async with method as stream:
                for _ in range(INBOX_MESSAGES):
                    await stream.send(b"x")
                with pytest.raises(RemoteError) as caught:
                    await stream.recv()
                assert caught.value.code == Code.RESOURCE_EXHAUSTED
            method = client.stream("demo", "Double", client_streams=True, server_streams=True)
            async with method as stream:
                await stream.send(b"4")
                assert await stream.recv() == b"8"

    run(main)


def test_client_that_does_not_read_a_stream_loses_that_stream_only() -> None:
    async def main() -> None:
        async with raw_client(stall_grace_s=0.05) as (client, peer):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                call = asyncio.create_task(client.call("demo", "Get", b"", timeout_s=None))
                await peer.send(b"".join(frame(1, DATA, 0, b"x") for _ in range(INBOX_MESSAGES)))
                await peer.frame()
                await peer.frame()
                await peer.send(frame(3, RESPONSE, 0, b"\x12\x02ok"))
                assert await call == b"ok"
                with pytest.raises(TtrpcError) as caught:
                    await stream.recv()
                assert caught.value.code == Code.RESOURCE_EXHAUSTED
                assert client._core.open_streams == 0

    run(main)


def test_client_that_reads_in_time_keeps_its_stream() -> None:
    async def main() -> None:
        async with raw_client(stall_grace_s=60) as (client, peer):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                numbers = [b"%d" % number for number in range(5 * INBOX_MESSAGES)]
                await peer.send(b"".join(frame(1, DATA, 0, number) for number in numbers) + frame(1, DATA, END))
                assert [message async for message in stream] == numbers

    run(main)


def test_inbox_takes_nothing_after_its_end_and_keeps_the_first_reason() -> None:
    async def main() -> None:
        inbox = Inbox(lambda: None)
        inbox.put(b"before")
        inbox.end(TtrpcError(Code.ABORTED, "first"))
        inbox.put(b"after")
        inbox.end(TtrpcError(Code.ABORTED, "second"))
        assert await inbox.get() == b"before"
        for _ in range(2):
            with pytest.raises(TtrpcError, match="first"):
                await inbox.get()

    run(main)
