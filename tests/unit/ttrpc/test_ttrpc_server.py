"""The asyncio server: how calls run, end, time out, and what a peer can and cannot do to it."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
from ttrpc_peers import DEMO, code_of, echo, fails_alone, frame, raw_server, request, until

from pyshim.ttrpc.framing import DATA, RESPONSE
from pyshim.ttrpc.handlers import CallContext, UnaryHandler
from pyshim.ttrpc.status import Code, RemoteError
from tests.fakes.served import served


@pytest.mark.parametrize("size", [0, 1, 1 << 14, 1 << 20, (4 << 20) - 100], ids=str)
async def test_payload_arrives_unchanged(size: int) -> None:
    payload = os.urandom(size)

    async with served(DEMO) as (_, client):
        assert await client.call("demo", "Echo", payload, timeout_s=None) == payload


async def test_a_hundred_calls_run_at_once_and_finish_in_any_order() -> None:
    arrived = 0
    everyone = asyncio.Event()

    async def last_first(payload: bytes, call: CallContext) -> bytes:
        nonlocal arrived
        arrived += 1
        if arrived == 100:
            everyone.set()
        await everyone.wait()
        for _ in range(100 - int(payload)):
            await asyncio.sleep(0)
        order.append(int(payload))
        return payload * 2

    order: list[int] = []
    async with served({"demo": {"Echo": last_first}}) as (_, client):
        calls = [client.call("demo", "Echo", b"%d" % n, timeout_s=None) for n in range(100)]
        assert await asyncio.gather(*calls) == [b"%d" % n * 2 for n in range(100)]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(("service", "method"), [("demo", "Nothing"), ("nobody", "Echo"), ("", ""), ("x" * 70_000, "")])
async def test_unknown_service_or_method_is_unimplemented(service: str, method: str) -> None:
    async with served(DEMO) as (_, client):
        with pytest.raises(RemoteError) as caught:
            await client.call(service, method, b"", timeout_s=None)
        assert caught.value.code == Code.UNIMPLEMENTED
        assert len(caught.value.message) < 300


class Gone(Exception):
    code = Code.NOT_FOUND


class Odd(Exception):
    code = 99


class Texty(Exception):
    code = "5"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        pytest.param(Gone("container 'c1': no such"), Code.NOT_FOUND, "container 'c1': no such", id="code"),
        pytest.param(ValueError("boom"), Code.INTERNAL, "ValueError: boom", id="no code"),
        pytest.param(Odd("strange"), Code.INTERNAL, "Odd: strange", id="code out of range"),
        pytest.param(Texty("strange"), Code.INTERNAL, "Texty: strange", id="code no int"),
        pytest.param(OSError(2, "open '/a\udcff'"), Code.INTERNAL, None, id="text beyond UTF-8"),
        pytest.param(ValueError("x" * 5_000_000), Code.INTERNAL, None, id="text over the limit"),
        pytest.param(asyncio.CancelledError(), Code.CANCELLED, None, id="cancelled from within"),
    ],
)
async def test_exception_becomes_status(error: BaseException, code: int, message: str | None) -> None:
    async def fail(payload: bytes, call: CallContext) -> bytes:
        raise error

    async with served({"demo": {"Fail": fail, "Echo": echo}}) as (_, client):
        failure = await fails_alone(client, "Fail")

    assert failure.code == code
    assert message is None or failure.message == message


async def test_traceback_of_an_unforeseen_exception_goes_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(payload: bytes, call: CallContext) -> bytes:
        raise ValueError("inner detail")

    with caplog.at_level(logging.ERROR):
        async with served({"demo": {"Fail": fail}}) as (_, client):
            with pytest.raises(RemoteError) as caught:
                await client.call("demo", "Fail", b"", timeout_s=None)
    message = caught.value.message

    assert "Traceback" not in message
    assert "in fail" in caplog.text


@pytest.mark.parametrize("result", [None, "text", 5])
async def test_handler_that_returns_no_bytes_is_an_internal_error(result: object) -> None:
    async def wrong(payload: bytes, call: CallContext) -> bytes:
        return result  # type: ignore[return-value]

    async with served({"demo": {"Wrong": wrong}}) as (_, client):
        with pytest.raises(RemoteError, match="expected bytes") as caught:
            await client.call("demo", "Wrong", b"", timeout_s=None)
        assert caught.value.code == Code.INTERNAL


async def test_context_tells_metadata_deadline_and_peer() -> None:
    seen: list[CallContext] = []

    async def look(payload: bytes, call: CallContext) -> bytes:
        seen.append(call)
        return b""

    async with served({"demo": {"Look": look}}) as (_, client):
        before = asyncio.get_running_loop().time()
        metadata = [("containerd-namespace-ttrpc", "k8s.io"), ("a", "b")]
        await client.call("demo", "Look", b"", timeout_s=60, metadata=metadata)
        await client.call("demo", "Look", b"", timeout_s=None)
    first, second = seen
    assert (first.service, first.method, first.stream_id) == ("demo", "Look", 1)
    assert dict(first.metadata).get("containerd-namespace-ttrpc") == "k8s.io"
    assert first.deadline is not None
    assert 60 <= first.deadline - before < 90
    assert second.deadline is None
    assert first.peer is not None
    assert (first.peer.pid, first.peer.uid, first.peer.gid) == (os.getpid(), os.getuid(), os.getgid())


async def test_deadline_is_answered_and_the_handler_works_on() -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def slow(payload: bytes, call: CallContext) -> bytes:
        await go.wait()
        done.set()
        return b"too late"

    async with raw_server({"demo": {"Slow": slow, "Echo": echo}}) as (server, peer):
        await peer.send(request(1, "Slow", timeout_ns=1_000_000))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        assert len(server._handlers) == 1
        go.set()
        await done.wait()
        await peer.send(request(3, payload=b"next"))
        assert await peer.frame() == (3, RESPONSE, 0, b"\x12\x04next")


async def test_a_server_may_leave_deadlines_to_its_handlers() -> None:
    async def slow(payload: bytes, call: CallContext) -> bytes:
        assert call.deadline is not None
        await asyncio.sleep(call.deadline - asyncio.get_running_loop().time() + 0.05)
        return b"late"

    async with raw_server({"demo": {"Slow": slow}}, answers_at_deadline=False) as (_, peer):
        await peer.send(request(1, "Slow", timeout_ns=1_000_000))
        assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x04late")


async def test_deadline_cancels_a_handler_that_allows_it() -> None:
    cancelled = asyncio.Event()

    async def wait(payload: bytes, call: CallContext) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with raw_server({"demo": {"Wait": UnaryHandler(wait, cancel_on_timeout=True)}}) as (_, peer):
        await peer.send(request(1, "Wait", timeout_ns=1_000_000))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        await cancelled.wait()


async def test_timeout_of_one_nanosecond_is_answered_even_if_the_handler_never_starts() -> None:
    async with raw_server({"demo": {"Echo": UnaryHandler(echo, cancel_on_timeout=True)}}) as (server, peer):
        await peer.send(request(1, timeout_ns=1))
        stream_id, code, _ = await code_of(peer)
        assert (stream_id, code) in {(1, Code.DEADLINE_EXCEEDED), (1, Code.OK)}
        await until(lambda: len(server._handlers) == 0)


async def test_dropped_connection_does_not_stop_the_work() -> None:
    entered, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(payload: bytes, call: CallContext) -> bytes:
        entered.set()
        await go.wait()
        done.set()
        return b"unread"

    async with raw_server({"demo": {"Work": work}}) as (server, peer):
        await peer.send(request(1, "Work"))
        await entered.wait()
        peer.close()
        await until(lambda: server.connections == 0)
        assert len(server._handlers) == 1
        go.set()
        await done.wait()


async def test_dropped_connection_cancels_a_handler_that_only_waits() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(payload: bytes, call: CallContext) -> bytes:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with raw_server({"demo": {"Wait": UnaryHandler(wait, cancel_on_timeout=True)}}) as (_, peer):
        await peer.send(request(1, "Wait"))
        await entered.wait()
        peer.close()
        await cancelled.wait()


async def test_request_and_its_own_refusal_in_one_read_are_answered_once() -> None:
    async with raw_server(DEMO) as (_, peer):
        await peer.send(request(1, "Nothing") + frame(1, DATA, 0, b"x") + request(3) + frame(3, DATA, 0, b"x"))
        await peer.send(request(5))
        replies = [await peer.frame() for _ in range(3)]
        assert [reply[0] for reply in replies if reply] == [1, 3, 5]
