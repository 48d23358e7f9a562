"""Streaming methods in all directions, through real server and client."""

from __future__ import annotations

import asyncio

import pytest
from demo_streams import SERVICES
from ttrpc_peers import END, frame, raw_client, raw_server, request, run, served

from pyshim.ttrpc.framing import DATA, FLAG_NO_DATA, FLAG_REMOTE_CLOSED, FLAG_REMOTE_OPEN, RESPONSE
from pyshim.ttrpc.handlers import CallContext, ServerStream, StreamHandler
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
