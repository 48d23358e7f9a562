"""The asyncio server: how calls run, end, time out, and what a peer can and cannot do to it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest
from ttrpc_peers import RawPeer, frame, raw_server, request, run, served, until

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.framing import DATA, FLAG_REMOTE_OPEN, HEADER, REQUEST, RESPONSE
from pyshim.ttrpc.handlers import CallContext, UnaryHandler
from pyshim.ttrpc.messages import decode_response
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.status import Code, OutcomeUnknown, RemoteError


async def echo(payload: bytes, call: CallContext) -> bytes:
    return payload


DEMO = {"demo": {"Echo": echo}}


async def code_of(peer: RawPeer) -> tuple[int, int, str]:
    """(stream id, code, message) of the peer's next response."""
    received = await peer.frame()
    assert received is not None
    stream_id, type_, _flags, payload = received
    assert type_ == RESPONSE
    reply = decode_response(payload)
    return stream_id, reply.code, reply.message


def test_a_call_is_answered() -> None:
    async def main() -> bytes:
        async with served(DEMO) as (_, client):
            return await client.call("demo", "Echo", b"hello", timeout_s=None)

    assert run(main) == b"hello"


@pytest.mark.parametrize("size", [0, 1, 1 << 14, 1 << 20, (4 << 20) - 100], ids=str)
def test_payload_arrives_unchanged(size: int) -> None:
    payload = os.urandom(size)

    async def main() -> bytes:
        async with served(DEMO) as (_, client):
            return await client.call("demo", "Echo", payload, timeout_s=None)

    assert run(main) == payload


def test_a_hundred_calls_run_at_once_and_finish_in_any_order() -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize(("service", "method"), [("demo", "Nothing"), ("nobody", "Echo"), ("", ""), ("x" * 70_000, "")])
def test_unknown_service_or_method_is_unimplemented(service: str, method: str) -> None:
    async def main() -> None:
        async with served(DEMO) as (_, client):
            with pytest.raises(RemoteError) as caught:
                await client.call(service, method, b"", timeout_s=None)
            assert caught.value.code == Code.UNIMPLEMENTED
            assert len(caught.value.message) < 300

    run(main)


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
def test_exception_becomes_status(error: BaseException, code: int, message: str | None) -> None:
    async def fail(payload: bytes, call: CallContext) -> bytes:
        raise error

    async def main() -> None:
        async with served({"demo": {"Fail": fail, "Echo": echo}}) as (_, client):
            with pytest.raises(RemoteError) as caught:
                await client.call("demo", "Fail", b"", timeout_s=None)
            assert caught.value.code == code
            assert message is None or caught.value.message == message
            assert await client.call("demo", "Echo", b"alive", timeout_s=None) == b"alive"

    run(main)


def test_traceback_of_an_unforeseen_exception_goes_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(payload: bytes, call: CallContext) -> bytes:
        raise ValueError("inner detail")

    async def main() -> str:
        async with served({"demo": {"Fail": fail}}) as (_, client):
            with pytest.raises(RemoteError) as caught:
                await client.call("demo", "Fail", b"", timeout_s=None)
            return caught.value.message

    with caplog.at_level(logging.ERROR):
        message = run(main)

    assert "Traceback" not in message
    assert "in fail" in caplog.text


@pytest.mark.parametrize("result", [None, "text", 5])
def test_handler_that_returns_no_bytes_is_an_internal_error(result: object) -> None:
    async def wrong(payload: bytes, call: CallContext) -> bytes:
        return result  # type: ignore[return-value]

    async def main() -> None:
        async with served({"demo": {"Wrong": wrong}}) as (_, client):
            with pytest.raises(RemoteError, match="expected bytes") as caught:
                await client.call("demo", "Wrong", b"", timeout_s=None)
            assert caught.value.code == Code.INTERNAL

    run(main)


def test_context_tells_metadata_deadline_and_peer() -> None:
    async def main() -> None:
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
        assert first.metadata_value("containerd-namespace-ttrpc") == "k8s.io"
        assert first.metadata_value("none") is None
        assert first.deadline is not None
        assert 60 <= first.deadline - before < 90
        assert second.deadline is None
        assert first.peer is not None
        assert (first.peer.pid, first.peer.uid, first.peer.gid) == (os.getpid(), os.getuid(), os.getgid())

    run(main)


def test_deadline_is_answered_and_the_handler_works_on() -> None:
    async def main() -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def slow(payload: bytes, call: CallContext) -> bytes:
            await go.wait()
            done.set()
            return b"too late"

        async with raw_server({"demo": {"Slow": slow, "Echo": echo}}) as (server, peer):
            await peer.send(request(1, "Slow", timeout_ns=1_000_000))
            assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
            assert server.running_handlers == 1
            go.set()
            await done.wait()
            await peer.send(request(3, payload=b"next"))
            assert await peer.frame() == (3, RESPONSE, 0, b"\x12\x04next")

    run(main)


def test_a_server_may_leave_deadlines_to_its_handlers() -> None:
    async def main() -> None:
        async def slow(payload: bytes, call: CallContext) -> bytes:
            assert call.deadline is not None
            await asyncio.sleep(call.deadline - asyncio.get_running_loop().time() + 0.05)
            return b"late"

        async with raw_server({"demo": {"Slow": slow}}, answers_at_deadline=False) as (_, peer):
            await peer.send(request(1, "Slow", timeout_ns=1_000_000))
            assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x04late")

    run(main)


def test_deadline_cancels_a_handler_that_allows_it() -> None:
    async def main() -> None:
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

    run(main)


def test_timeout_of_one_nanosecond_is_answered_even_if_the_handler_never_starts() -> None:
    async def main() -> None:
        async with raw_server({"demo": {"Echo": UnaryHandler(echo, cancel_on_timeout=True)}}) as (server, peer):
            await peer.send(request(1, timeout_ns=1))
            stream_id, code, _ = await code_of(peer)
            assert (stream_id, code) in {(1, Code.DEADLINE_EXCEEDED), (1, Code.OK)}
            await until(lambda: server.running_handlers == 0)

    run(main)


def test_dropped_connection_does_not_stop_the_work() -> None:
    async def main() -> None:
        entered, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work(payload: bytes, call: CallContext) -> bytes:
            entered.set()
            await go.wait()
            done.set()
            return b"for nobody"

        async with raw_server({"demo": {"Work": work}}) as (server, peer):
            await peer.send(request(1, "Work"))
            await entered.wait()
            peer.close()
            await until(lambda: server.connections == 0)
            assert server.running_handlers == 1
            go.set()
            await done.wait()

    run(main)


def test_dropped_connection_cancels_a_handler_that_only_waits() -> None:
    async def main() -> None:
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

    run(main)


def test_frame_of_five_megabytes_is_exhausted_and_the_connection_lives_on() -> None:
    async def main() -> None:
        async with raw_server(DEMO) as (_, peer):
            await peer.send(HEADER.pack(5 << 20, 1, REQUEST, 0))
            assert (await code_of(peer))[:2] == (1, Code.RESOURCE_EXHAUSTED)
            await peer.send(bytes(5 << 20) + request(3, payload=b"ok"))
            assert await peer.frame() == (3, RESPONSE, 0, b"\x12\x02ok")

    run(main)


def test_reply_over_the_limit_is_exhausted_and_the_connection_lives_on() -> None:
    async def huge(payload: bytes, call: CallContext) -> bytes:
        return bytes(5 << 20)

    async def main() -> None:
        async with served({"demo": {"Huge": huge, "Echo": echo}}) as (_, client):
            with pytest.raises(RemoteError) as caught:
                await client.call("demo", "Huge", b"", timeout_s=None)
            assert caught.value.code == Code.RESOURCE_EXHAUSTED
            assert await client.call("demo", "Echo", b"ok", timeout_s=None) == b"ok"

    run(main)


@pytest.mark.parametrize("second", [2, 3, 1], ids=["even", "reused", "lower"])
def test_bad_stream_id_is_invalid_and_the_connection_lives_on(second: int) -> None:
    async def main() -> None:
        async with raw_server(DEMO) as (_, peer):
            await peer.send(request(3))
            assert await peer.frame() == (3, RESPONSE, 0, b"")
            await peer.send(request(second) + request(5))
            assert (await code_of(peer))[:2] == (second, Code.INVALID_ARGUMENT)
            assert await peer.frame() == (5, RESPONSE, 0, b"")

    run(main)


def test_requests_beyond_the_bound_are_exhausted_while_others_wait() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def wait(payload: bytes, call: CallContext) -> bytes:
            await go.wait()
            return b""

        async with raw_server({"demo": {"Wait": wait, "Echo": echo}}, max_in_flight=3) as (server, peer):
            await peer.send(b"".join(request(n, "Wait") for n in (1, 3, 5, 7)))
            assert (await code_of(peer))[:2] == (7, Code.RESOURCE_EXHAUSTED)
            assert server.running_handlers == 3
            go.set()
            assert {(await code_of(peer))[:2] for _ in range(3)} == {(1, 0), (3, 0), (5, 0)}
            await peer.send(request(9))
            assert await peer.frame() == (9, RESPONSE, 0, b"")

    run(main)


def test_handlers_past_their_deadline_still_count_as_in_flight() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def wait(payload: bytes, call: CallContext) -> bytes:
            await go.wait()
            return b""

        async with raw_server({"demo": {"Wait": wait}}, max_in_flight=1) as (_, peer):
            await peer.send(request(1, "Wait", timeout_ns=1))
            assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
            await peer.send(request(3, "Wait"))
            assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
            go.set()

    run(main)


def test_request_bytes_in_flight_are_bounded() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def wait(payload: bytes, call: CallContext) -> bytes:
            await go.wait()
            return b""

        async with raw_server({"demo": {"Wait": wait}}, max_in_flight_bytes=1000) as (_, peer):
            await peer.send(request(1, "Wait", bytes(600)) + request(3, "Wait", bytes(600)))
            assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
            go.set()
            assert (await code_of(peer))[:2] == (1, 0)
            # What has ended does not count; and one request alone may always be as large as a message.
            go.clear()
            await peer.send(request(5, "Wait", bytes(500)) + request(7, "Wait", bytes(400)) + request(9, "Other"))
            assert (await code_of(peer))[0] == 9
            go.set()
            assert {(await code_of(peer))[:2] for _ in range(2)} == {(5, 0), (7, 0)}
            await peer.send(request(11, "Wait", bytes(2000)))
            assert (await code_of(peer))[:2] == (11, 0)

    run(main)


def test_peer_that_does_not_read_is_not_read_from_and_costs_bounded_memory() -> None:
    reply = bytes(64 << 10)

    async def main() -> None:
        started = 0

        async def large(payload: bytes, call: CallContext) -> bytes:
            nonlocal started
            started += 1
            return reply

        services = {"demo": {"Large": large}}
        async with raw_server(services, queue_bytes=256 << 10, max_in_flight=50) as (server, peer):
            asked = 0
            try:
                async with asyncio.timeout(0.5):
                    while True:
                        await peer.send(request(2 * asked + 1, "Large", bytes(4096)))
                        asked += 1
            except TimeoutError:
                pass
            session = next(iter(server._sessions))
            assert session._link.queued_bytes <= (256 << 10) + len(reply) + 100 * 100
            assert server.running_handlers <= 50
            stalled_at = started
            assert stalled_at < asked
            answered = 0
            async with asyncio.timeout(20):
                while answered < stalled_at:
                    received = await peer.frame()
                    assert received is not None
                    answered += 1

    run(main)


def test_shutdown_lets_calls_finish_and_sends_their_replies_before_closing() -> None:
    async def main() -> None:
        go, entered = asyncio.Event(), asyncio.Event()

        async def slow(payload: bytes, call: CallContext) -> bytes:
            entered.set()
            await go.wait()
            return bytes(3 << 20)

        server = Server(services={"demo": {"Slow": slow, "Echo": echo}})
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(server.serve_connection(theirs))
        client = await Client.connect_socket(ours)
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
        assert (server.connections, server.running_handlers) == (0, 0)

    run(main)


def test_shutdown_cancels_what_outlives_the_grace_and_answers_it() -> None:
    async def main() -> None:
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
            assert server.running_handlers == 0

    run(main)


def test_shutdown_does_not_wait_long_for_a_peer_that_does_not_read() -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def large(payload: bytes, call: CallContext) -> bytes:
            entered.set()
            return bytes(4_000_000)

        async with raw_server({"demo": {"Large": large}}) as (server, peer):
            await peer.send(request(1, "Large"))
            await entered.wait()
            await server.shutdown(5)
            assert server.connections == 0

    run(main)


def test_shutdown_from_a_handler_is_refused() -> None:
    async def main() -> None:
        async def stop(payload: bytes, call: CallContext) -> bytes:
            await server.shutdown(1)
            return b""

        async with served({"demo": {"Stop": stop}}) as (server, client):
            with pytest.raises(RemoteError, match="called by one of its handlers"):
                await client.call("demo", "Stop", b"", timeout_s=None)
            assert not server.draining

    run(main)


async def connected(path: Path) -> Client:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except OSError:
        sock.close()
        raise
    return await Client.connect_socket(sock)


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_listener_serves_many_connections_until_shutdown(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_cancelling_serve_closes_the_listener_and_keeps_connections(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_peer_that_is_not_authorized_is_closed_before_it_is_heard(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_accepting_survives_running_out_of_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import resource

    async def main() -> None:
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
        client = await Client.connect_socket(waiting)
        assert await client.call("demo", "Echo", b"x", timeout_s=None) == b"x"
        client.close()
        await server.shutdown(0)
        await serving

    with caplog.at_level(logging.ERROR):
        run(main)


def test_peer_of_ttrpc_1_1_sees_only_requests_and_responses() -> None:
    async def main() -> None:
        async with raw_server(DEMO) as (_, peer):
            await peer.send(request(1, payload=b"a", flags=0) + request(3, payload=b"b", flags=0xF8))
            frames = [await peer.frame(), await peer.frame()]
            assert frames == [(1, RESPONSE, 0, b"\x12\x01a"), (3, RESPONSE, 0, b"\x12\x01b")]

    run(main)


def test_request_and_its_own_refusal_in_one_read_are_answered_once() -> None:
    async def main() -> None:
        async with raw_server(DEMO) as (_, peer):
            await peer.send(request(1, "Nothing") + frame(1, DATA, 0, b"x") + request(3) + frame(3, DATA, 0, b"x"))
            await peer.send(request(5))
            replies = [await peer.frame() for _ in range(3)]
            assert [reply[0] for reply in replies if reply] == [1, 3, 5]

    run(main)


def test_data_for_a_unary_method_opened_as_a_stream_is_ignored() -> None:
    async def main() -> None:
        async with raw_server(DEMO) as (_, peer):
            await peer.send(request(1, payload=b"p", flags=FLAG_REMOTE_OPEN) + frame(1, DATA, 0, b"x"))
            assert await peer.frame() == (1, RESPONSE, 0, b"\x12\x01p")

    run(main)
