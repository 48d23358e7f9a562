"""Streaming methods in all directions, through real server and client, and readers that do not keep up."""

from __future__ import annotations

import asyncio

import pytest
from ttrpc_peers import frame, raw_client, raw_server, request, run, served

from pyshim.ttrpc.framing import DATA, FLAG_NO_DATA, FLAG_REMOTE_CLOSED, FLAG_REMOTE_OPEN, HEADER, RESPONSE
from pyshim.ttrpc.handlers import CallContext, ServerStream, StreamHandler
from pyshim.ttrpc.inbox import INBOX_MESSAGES, Inbox
from pyshim.ttrpc.messages import decode_response
from pyshim.ttrpc.status import (
    Code,
    ConnectionClosed,
    DeadlineExceeded,
    LocalProtocolError,
    OutcomeUnknown,
    RemoteError,
    RemoteProtocolError,
    TtrpcError,
)

END = FLAG_REMOTE_CLOSED | FLAG_NO_DATA


async def total(stream: ServerStream, call: CallContext) -> bytes:
    """Client stream: the sum of the numbers received."""
    return b"%d" % sum([int(message) async for message in stream])


async def count(stream: ServerStream, call: CallContext) -> None:
    """Server stream: the numbers below the one received."""
    limit = await stream.recv()
    assert limit is not None
    for number in range(int(limit)):
        await stream.send(b"%d" % number)


async def double(stream: ServerStream, call: CallContext) -> None:
    """Both: every number twice as large."""
    async for message in stream:
        await stream.send(b"%d" % (2 * int(message)))


async def fail(stream: ServerStream, call: CallContext) -> None:
    await stream.send(b"before")
    raise TtrpcError(Code.ABORTED, "stopped")


SERVICES = {
    "demo": {
        "Total": StreamHandler(total, client_streams=True, server_streams=False),
        "Count": StreamHandler(count, client_streams=False, server_streams=True),
        "Double": StreamHandler(double, client_streams=True, server_streams=True),
        "Fail": StreamHandler(fail, client_streams=True, server_streams=True),
    }
}


def test_client_stream() -> None:
    async def main() -> None:
        async with (
            served(SERVICES) as (_, client),
            client.stream("demo", "Total", client_streams=True, server_streams=False) as stream,
        ):
            for number in range(200):
                await stream.send(b"%d" % number)
            await stream.close_send()
            assert await stream.recv() == b"19900"
            assert await stream.recv() is None

    run(main)


def test_first_message_of_a_client_stream_may_come_with_the_request() -> None:
    async def main() -> None:
        async with (
            served(SERVICES) as (_, client),
            client.stream("demo", "Total", b"40", client_streams=True, server_streams=False) as stream,
        ):
            await stream.send(b"2")
            await stream.close_send()
            assert await stream.recv() == b"42"

    run(main)


def test_server_stream() -> None:
    async def main() -> None:
        async with (
            served(SERVICES) as (_, client),
            client.stream("demo", "Count", b"500", client_streams=False, server_streams=True) as stream,
        ):
            assert [int(message) async for message in stream] == list(range(500))

    run(main)


def test_bidirectional_stream() -> None:
    async def main() -> None:
        async with (
            served(SERVICES) as (_, client),
            client.stream("demo", "Double", client_streams=True, server_streams=True) as stream,
        ):
            for number in range(100):
                await stream.send(b"%d" % number)
                assert await stream.recv() == b"%d" % (2 * number)
            await stream.close_send()
            assert await stream.recv() is None
            assert client._core.open_streams == 0

    run(main)


def test_streams_and_calls_share_a_connection() -> None:
    async def main() -> None:
        async def use(number: int) -> list[int]:
            method = client.stream("demo", "Double", client_streams=True, server_streams=True)
            async with method as stream:
                for step in range(20):
                    await stream.send(b"%d" % (number + step))
                await stream.close_send()
                return [int(message) async for message in stream]

        async with served(SERVICES) as (_, client):
            results = await asyncio.gather(*map(use, range(30)))
            assert results == [[2 * (number + step) for step in range(20)] for number in range(30)]

    run(main)


def test_server_stream_on_the_wire() -> None:
    async def main() -> None:
        async with raw_server(SERVICES) as (_, peer):
            await peer.send(request(1, "Count", b"2", flags=FLAG_REMOTE_CLOSED))
            frames = [await peer.frame() for _ in range(3)]
            assert frames == [(1, DATA, 0, b"0"), (1, DATA, 0, b"1"), (1, DATA, END, b"")]

    run(main)


def test_client_stream_on_the_wire() -> None:
    async def main() -> None:
        async with raw_server(SERVICES) as (_, peer):
            opening = request(1, "Total", flags=FLAG_REMOTE_OPEN)
            await peer.send(opening + frame(1, DATA, 0, b"4") + frame(1, DATA, 0, b"5") + frame(1, DATA, END))
            assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x019")

    run(main)


def test_empty_message_is_a_message_and_no_data_is_none() -> None:
    async def sizes(stream: ServerStream, call: CallContext) -> bytes:
        return repr([len(message) async for message in stream]).encode()

    async def main() -> None:
        services = {"demo": {"Sizes": StreamHandler(sizes, client_streams=True, server_streams=False)}}
        async with raw_server(services) as (_, peer):
            data = frame(1, DATA, 0) + frame(1, DATA, FLAG_NO_DATA) + frame(1, DATA, 0, b"ab")
            await peer.send(request(1, "Sizes", flags=FLAG_REMOTE_OPEN) + data + frame(1, DATA, END))
            assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x06[0, 2]")

    run(main)


def test_error_of_a_stream_handler_ends_the_stream_with_its_status() -> None:
    async def main() -> None:
        async with (
            served(SERVICES) as (_, client),
            client.stream("demo", "Fail", client_streams=True, server_streams=True) as stream,
        ):
            assert await stream.recv() == b"before"
            with pytest.raises(RemoteError) as caught:
                await stream.recv()
            assert (caught.value.code, caught.value.message) == (Code.ABORTED, "stopped")
            with pytest.raises(LocalProtocolError):
                await stream.send(b"more")
            await stream.close_send()

    run(main)


def test_reply_of_the_wrong_kind_is_an_internal_error() -> None:
    async def wrong(stream: ServerStream, call: CallContext) -> bytes:
        return b"reply"

    async def main() -> None:
        services = {"demo": {"Wrong": StreamHandler(wrong, client_streams=False, server_streams=True)}}
        async with (
            served(services) as (_, client),
            client.stream("demo", "Wrong", b"", client_streams=False, server_streams=True) as stream,
        ):
            with pytest.raises(RemoteError, match="expected None"):
                await stream.recv()

    run(main)


def test_deadline_ends_a_stream_on_both_sides() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        seen = asyncio.Event()

        async def wait(stream: ServerStream, call: CallContext) -> None:
            try:
                await stream.recv()
            except TtrpcError as exc:
                errors.append(exc)
            try:
                await stream.send(b"late")
            except TtrpcError as exc:
                errors.append(exc)
            seen.set()

        services = {"demo": {"Wait": StreamHandler(wait, client_streams=True, server_streams=True)}}
        async with served(services) as (_, client):
            method = client.stream("demo", "Wait", client_streams=True, server_streams=True, timeout_s=0.05)
            async with method as stream:
                # Which side's clock ends it first is not determined; the code is the same.
                with pytest.raises((DeadlineExceeded, RemoteError)) as caught:
                    await stream.recv()
            await seen.wait()
            assert caught.value.code == Code.DEADLINE_EXCEEDED
            assert [type(error) for error in errors] == [DeadlineExceeded, DeadlineExceeded]

    run(main)


def test_handler_learns_that_the_connection_dropped() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        entered, seen = asyncio.Event(), asyncio.Event()

        async def wait(stream: ServerStream, call: CallContext) -> None:
            entered.set()
            try:
                await stream.recv()
            except TtrpcError as exc:
                errors.append(exc)
            seen.set()

        services = {"demo": {"Wait": StreamHandler(wait, client_streams=True, server_streams=True)}}
        async with raw_server(services) as (_, peer):
            await peer.send(request(1, "Wait", flags=FLAG_REMOTE_OPEN))
            await entered.wait()
            peer.close()
            await seen.wait()
            assert [type(error) for error in errors] == [ConnectionClosed]

    run(main)


def test_messages_before_a_drop_are_delivered_then_the_outcome_is_unknown() -> None:
    async def main() -> None:
        async with raw_client() as (client, peer):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                await peer.frame()
                await peer.send(frame(1, DATA, 0, b"one"))
                peer.close()
                await client.closed()
                assert await stream.recv() == b"one"
                with pytest.raises(OutcomeUnknown):
                    await stream.recv()

    run(main)


def test_data_instead_of_a_response_fails_the_stream() -> None:
    async def main() -> None:
        async with raw_client() as (client, peer):
            method = client.stream("demo", "Total", client_streams=True, server_streams=False)
            async with method as stream:
                await peer.frame()
                await peer.send(frame(1, DATA, 0, b"one"))
                with pytest.raises(RemoteProtocolError):
                    await stream.recv()

    run(main)


def test_plain_response_may_end_a_server_stream() -> None:
    async def main() -> None:
        async with raw_client() as (client, peer):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                await peer.send(frame(1, DATA, 0, b"one") + frame(1, RESPONSE, 0))
                assert [message async for message in stream] == [b"one"]

    run(main)


def test_left_stream_is_forgotten() -> None:
    async def main() -> None:
        async with raw_client() as (client, peer):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                await peer.frame()
            with pytest.raises(LocalProtocolError):
                await stream.recv()
            call = asyncio.create_task(client.call("demo", "Get", b"", timeout_s=None))
            await peer.send(frame(1, DATA, 0, b"late") + frame(3, RESPONSE, 0))
            assert await call == b""
            assert (client.late_frames, client._streams) == (1, {})

    run(main)


def test_second_receiver_of_one_stream_is_refused() -> None:
    async def main() -> None:
        async with raw_client() as (client, _):
            method = client.stream("demo", "Watch", b"", client_streams=False, server_streams=True)
            async with method as stream:
                first = asyncio.create_task(stream.recv())
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="another task"):
                    await stream.recv()
                first.cancel()

    run(main)


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
