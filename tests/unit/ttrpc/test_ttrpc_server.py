"""The asyncio server: how calls run, end and time out, its limits, and what a peer can and cannot do to it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from ttrpc_peers import DEMO, RawPeer, code_of, echo, fails_alone, frame, raw_server, request, until

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.framing import DATA, RESPONSE
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.session import CallContext, ImmediateHandler, UnaryHandler
from pyshim.ttrpc.status import Code, OutcomeUnknown, RemoteError
from tests.fakes.served import served


class Held:
    """A handler that waits until it may go on."""

    def __init__(self, reply: bytes = b"") -> None:
        self._reply = reply
        self.entered, self.go, self.done, self.cancelled = (asyncio.Event() for _ in range(4))

    async def __call__(self, payload: bytes, call: CallContext) -> bytes:
        self.entered.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.done.set()
        return self._reply


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
    slow = Held(b"too late")
    async with raw_server({"demo": {"Slow": slow, "Echo": echo}}) as (server, peer):
        await peer.send(request(1, "Slow", timeout_ns=1_000_000))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        assert len(server._handlers) == 1
        slow.go.set()
        await slow.done.wait()
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
    wait = Held()
    async with raw_server({"demo": {"Wait": UnaryHandler(wait, cancel_on_timeout=True)}}) as (_, peer):
        await peer.send(request(1, "Wait", timeout_ns=1_000_000))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        await wait.cancelled.wait()


async def test_timeout_of_one_nanosecond_is_answered_even_if_the_handler_never_starts() -> None:
    async with raw_server({"demo": {"Echo": UnaryHandler(echo, cancel_on_timeout=True)}}) as (server, peer):
        await peer.send(request(1, timeout_ns=1))
        stream_id, code, _ = await code_of(peer)
        assert (stream_id, code) in {(1, Code.DEADLINE_EXCEEDED), (1, Code.OK)}
        await until(lambda: len(server._handlers) == 0)


async def test_dropped_connection_does_not_stop_the_work() -> None:
    work = Held(b"unread")
    async with raw_server({"demo": {"Work": work}}) as (server, peer):
        await peer.send(request(1, "Work"))
        await work.entered.wait()
        peer.close()
        await until(lambda: server.connections == 0)
        assert len(server._handlers) == 1
        work.go.set()
        await work.done.wait()


async def test_dropped_connection_cancels_a_handler_that_only_waits() -> None:
    wait = Held()
    async with raw_server({"demo": {"Wait": UnaryHandler(wait, cancel_on_timeout=True)}}) as (_, peer):
        await peer.send(request(1, "Wait"))
        await wait.entered.wait()
        peer.close()
        await wait.cancelled.wait()


async def test_request_and_its_own_refusal_in_one_read_are_answered_once() -> None:
    async with raw_server(DEMO) as (_, peer):
        await peer.send(request(1, "Nothing") + frame(1, DATA, 0, b"x") + request(3) + frame(3, DATA, 0, b"x"))
        await peer.send(request(5))
        replies = [await peer.frame() for _ in range(3)]
        assert [reply[0] for reply in replies if reply] == [1, 3, 5]


async def test_shutdown_lets_calls_finish_and_sends_their_replies_before_closing() -> None:
    slow = Held(bytes(3 << 20))
    server = Server(services={"demo": {"Slow": slow, "Echo": echo}})
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(server.serve_connection(theirs))
    client = Client(ours)
    call = asyncio.create_task(client.call("demo", "Slow", b"", timeout_s=None))
    await slow.entered.wait()

    stopping = asyncio.create_task(server.shutdown(grace_s=10))
    await asyncio.sleep(0)
    with pytest.raises(RemoteError) as caught:
        await client.call("demo", "Echo", b"", timeout_s=None)
    slow.go.set()

    assert await call == bytes(3 << 20)
    assert caught.value.code == Code.UNAVAILABLE
    await stopping
    await serving
    await client.closed()
    assert (server.connections, len(server._handlers)) == (0, 0)


async def test_shutdown_cancels_what_outlives_the_grace_and_answers_it() -> None:
    forever = Held()
    async with served({"demo": {"Forever": forever}}) as (server, client):
        call = asyncio.create_task(client.call("demo", "Forever", b"", timeout_s=None))
        await forever.entered.wait()
        await server.shutdown(0.01)
        with pytest.raises(RemoteError) as caught:
            await call
        assert caught.value.code == Code.CANCELLED
        assert len(server._handlers) == 0


async def test_shutdown_does_not_wait_long_for_a_peer_that_does_not_read() -> None:
    large = Held(bytes(4_000_000))
    large.go.set()
    async with raw_server({"demo": {"Large": large}}) as (server, peer):
        await peer.send(request(1, "Large"))
        await large.entered.wait()
        await server.shutdown(5)
        assert server.connections == 0


async def test_shutdown_from_a_handler_is_refused() -> None:
    async def stop(payload: bytes, call: CallContext) -> bytes:
        await server.shutdown(1)
        return b""

    async with served({"demo": {"Stop": stop}}) as (server, client):
        with pytest.raises(RemoteError, match="called by one of its handlers"):
            await client.call("demo", "Stop", b"", timeout_s=None)
        assert not server.draining


async def connected(path: Path) -> Client:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except OSError:
        sock.close()
        raise
    return Client(sock)


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


async def test_listener_serves_many_connections_until_shutdown(tmp_path: Path) -> None:
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


async def test_cancelling_serve_closes_the_listener_and_keeps_connections(tmp_path: Path) -> None:
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


async def test_peer_that_is_not_authorized_is_closed_before_it_is_heard(tmp_path: Path) -> None:
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


async def test_accepting_survives_running_out_of_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import resource

    with caplog.at_level(logging.ERROR):
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
        client = Client(waiting)
        assert await client.call("demo", "Echo", b"x", timeout_s=None) == b"x"
        client.close()
        await server.shutdown(0)
        await serving


async def test_reply_over_the_limit_is_exhausted_and_the_connection_lives_on() -> None:
    async def huge(payload: bytes, call: CallContext) -> bytes:
        return bytes(5 << 20)

    async with served({"demo": {"Huge": huge, "Echo": echo}}) as (_, client):
        with pytest.raises(RemoteError) as caught:
            await client.call("demo", "Huge", b"", timeout_s=None)
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
        assert await client.call("demo", "Echo", b"ok", timeout_s=None) == b"ok"


async def test_requests_beyond_the_bound_are_exhausted_while_others_wait() -> None:
    wait = Held()
    async with raw_server({"demo": {"Wait": wait, "Echo": echo}}, max_in_flight=3) as (server, peer):
        await peer.send(b"".join(request(n, "Wait") for n in (1, 3, 5, 7)))
        assert (await code_of(peer))[:2] == (7, Code.RESOURCE_EXHAUSTED)
        assert len(server._handlers) == 3
        wait.go.set()
        assert {(await code_of(peer))[:2] for _ in range(3)} == {(1, 0), (3, 0), (5, 0)}
        await peer.send(request(9))
        assert await peer.frame() == (9, RESPONSE, 0, b"")


async def test_handlers_past_their_deadline_still_count_as_in_flight() -> None:
    wait = Held()
    async with raw_server({"demo": {"Wait": wait}}, max_in_flight=1) as (_, peer):
        await peer.send(request(1, "Wait", timeout_ns=1))
        assert (await code_of(peer))[:2] == (1, Code.DEADLINE_EXCEEDED)
        await peer.send(request(3, "Wait"))
        assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
        wait.go.set()


async def test_request_bytes_in_flight_are_bounded() -> None:
    wait = Held()
    async with raw_server({"demo": {"Wait": wait}}, max_in_flight_bytes=1000) as (_, peer):
        await peer.send(request(1, "Wait", bytes(600)) + request(3, "Wait", bytes(600)))
        assert (await code_of(peer))[:2] == (3, Code.RESOURCE_EXHAUSTED)
        wait.go.set()
        assert (await code_of(peer))[:2] == (1, 0)
        # Ended calls do not count; one request alone may always be as large as a message.
        wait.go.clear()
        await peer.send(request(5, "Wait", bytes(500)) + request(7, "Wait", bytes(400)) + request(9, "Other"))
        assert (await code_of(peer))[0] == 9
        wait.go.set()
        assert {(await code_of(peer))[:2] for _ in range(2)} == {(5, 0), (7, 0)}
        await peer.send(request(11, "Wait", bytes(2000)))
        assert (await code_of(peer))[:2] == (11, 0)


async def test_peer_that_does_not_read_is_not_read_from_and_costs_bounded_memory() -> None:
    reply = bytes(64 << 10)

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
        assert len(server._handlers) <= 50
        stalled_at = started
        assert stalled_at < asked
        answered = 0
        async with asyncio.timeout(20):
            while answered < stalled_at:
                received = await peer.frame()
                assert received is not None
                answered += 1


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    server = Server(services=DEMO, max_connections=2)
    pairs = [socket.socketpair() for _ in range(3)]
    tasks = [asyncio.ensure_future(server.serve_connection(theirs)) for _, theirs in pairs]
    await asyncio.sleep(0)
    assert server.connections == 2
    assert pairs[2][0].recv(1) == b""
    pairs[0][0].close()
    await tasks[0]
    again, theirs = socket.socketpair()
    tasks.append(asyncio.ensure_future(server.serve_connection(theirs)))
    await asyncio.sleep(0)
    assert server.connections == 2
    for ours in (pairs[1][0], pairs[2][0], again):
        ours.close()
    await asyncio.gather(*tasks)


def look(payload: bytes, call: CallContext) -> bytes:
    return payload + call.method.encode()


LOOK = {"demo": {"Look": ImmediateHandler(look), "Echo": echo}}


async def test_it_is_answered_without_a_task() -> None:
    tasks = []

    def which(payload: bytes, call: CallContext) -> bytes:
        tasks.append(asyncio.current_task())
        return payload

    async with served({"demo": {"Look": ImmediateHandler(which)}}) as (_, client):
        assert await client.call("demo", "Look", b"hello", timeout_s=5) == b"hello"
    assert tasks == [None]


async def test_replies_to_requests_that_came_together_leave_together() -> None:
    # Keeps apart what was sent apart.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = Server(services=LOOK)
    serving = asyncio.create_task(server.serve_connection(theirs))
    peer = RawPeer(ours)

    await peer.send(request(1, "Look", b"a") + request(3, "Look", b"b") + request(5, "Nothing"))
    together = await asyncio.get_running_loop().sock_recv(ours, 65536)
    await peer.send(request(7, "Look", b"c"))
    alone = await asyncio.get_running_loop().sock_recv(ours, 65536)

    assert [b"aLook" in together, b"bLook" in together, b"Nothing" in together] == [True, True, True]
    assert alone.endswith(b"cLook")
    peer.close()
    await server.shutdown(0)
    await serving


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        pytest.param(Gone("container 'c1': no such"), Code.NOT_FOUND, "container 'c1': no such", id="code"),
        pytest.param(ValueError("boom"), Code.INTERNAL, "ValueError: boom", id="no code"),
        pytest.param("text", Code.INTERNAL, "TypeError: method 'demo/Look' returned str, expected bytes", id="text"),
        pytest.param(bytes(5 << 20), Code.RESOURCE_EXHAUSTED, None, id="over the limit"),
    ],
)
async def test_an_error_is_answered_and_the_connection_lives_on(
    outcome: object, code: int, message: str | None
) -> None:
    def fail(payload: bytes, call: CallContext) -> bytes:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[return-value]

    async with served({"demo": {"Look": ImmediateHandler(fail), "Echo": echo}}) as (_, client):
        error = await fails_alone(client, "Look")

    assert error.code == code
    assert message is None or error.message == message


async def test_a_peer_that_does_not_read_is_not_answered_into_memory() -> None:
    asked = 0
    reply = bytes(64 << 10)

    def large(payload: bytes, call: CallContext) -> bytes:
        nonlocal asked
        asked += 1
        return reply

    services = {"demo": {"Look": ImmediateHandler(large)}}
    async with raw_server(services, queue_bytes=2 * len(reply)) as (server, peer):
        await peer.send(b"".join(request(2 * n + 1, "Look") for n in range(100)))
        await until(lambda: asked and len(server._handlers))
        seen = asked

        assert seen < 20  # the queue's, and what the kernel took
        for _ in range(100):
            frame = await peer.frame()
            assert frame is not None
            assert (frame[1], len(frame[3]) > len(reply)) == (RESPONSE, True)
        assert asked == 100
        assert len(server._handlers) == 0


async def test_after_the_connection_is_lost_nothing_is_asked_any_more() -> None:
    asked = 0

    def large(payload: bytes, call: CallContext) -> bytes:
        nonlocal asked
        asked += 1
        return bytes(1 << 20)

    services = {"demo": {"Look": ImmediateHandler(large)}}
    async with raw_server(services, queue_bytes=1) as (server, peer):
        await peer.send(b"".join(request(2 * n + 1, "Look") for n in range(5)))
        await until(lambda: len(server._handlers))
        peer.close()
        await until(lambda: not len(server._handlers))

    assert asked == 1


async def test_a_draining_server_refuses_it() -> None:
    async with raw_server(LOOK) as (server, peer):
        server.draining = True
        await peer.send(request(1, "Look"))
        assert (await code_of(peer))[:2] == (1, Code.UNAVAILABLE)


README = Path(__file__).resolve().parents[3] / "pyshim/ttrpc/README.md"


def test_the_example_answers_its_call(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)

    assert asyncio.run(scope["main"](str(tmp_path / "demo.sock"))) == b"value of key"
