"""A pod's spans on their way to a receiver of OTLP: what arrives, and what it costs when none takes them."""

import asyncio
import datetime
import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import ssl
import sys
import termios
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from pyshim.host.processes.children import Children
from pyshim.model.observation import NO_PARENT, Span, Trace, mark, span
from pyshim.node.cli.trace import as_otlp
from pyshim.tracing import child, exporter
from pyshim.tracing.exporter import SpanExporter, export, traces_url
from tests.fakes.self_signed import self_signed

from .receivers import PATIENCE_S, Receiver, saying, taken, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
DEAD = "http://127.0.0.1:1"
"""An address without a listener."""
POD = {
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": "u-1",
    "io.kubernetes.cri.image-name": "nothing of ours",
}


def counted() -> Trace:
    ticks = itertools.count(1_700_000_000_000_000_001)
    return Trace(lambda: next(ticks))


@asynccontextmanager
async def exporting(url: str, *, flush_s: float = PATIENCE_S) -> AsyncIterator[tuple[SpanExporter, Children]]:
    """An exporter whose child is real; both are gone afterwards."""
    children = Children()
    sender = SpanExporter(
        children, url=traces_url(url), trace_id=TRACE_ID, attributes={"service.name": "t"}, flush_s=flush_s
    )
    try:
        yield sender, children
    finally:
        await sender.close()
        assert children.alive == ()


def numbered(count: int) -> Iterable[tuple[int, Span]]:
    return ((number, Span(f"span {number}", NO_PARENT, 5, 7, "")) for number in range(count))


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Warnings of the shim's side: text and error."""
    return [
        (record.getMessage(), getattr(record, "error", ""))
        for record in caplog.records
        if record.name.startswith("pyshim.tracing") and record.levelno >= logging.WARNING
    ]


# ---- through the child


async def test_spans_arrive_as_they_were_under_the_ids_that_the_state_gives_them() -> None:
    trace, receiver = counted(), Receiver()

    async def create(children: Children) -> SpanExporter:
        with span("read configuration"):
            pass
        sender = export(children, trace, endpoint=receiver.url, sandbox_id="pod1", annotations=POD)
        with pytest.raises(ValueError, match="no"), span("start vmm"):
            raise ValueError("no")
        mark("first output")
        return sender

    async def execute() -> None:
        with span("agent ExecProcess", saved=False):
            pass

    children = Children()
    async with receiver.listening():
        with trace.of("create c1"):
            sender = await create(children)
        with trace.of("exec c1/e1", saved=False):
            await execute()
        await sender.close()
    assert children.alive == ()

    found = {arrived.name: arrived for arrived in receiver.spans()}
    assert list(found) == [
        *("read configuration", "start vmm", "first output", "create c1", "agent ExecProcess", "exec c1/e1")
    ]
    (drawn,) = as_otlp("pod1", tuple(trace.spans))["resourceSpans"][0]["scopeSpans"]  # type: ignore[index]
    for drawn_span in drawn["spans"]:
        arrived = found[drawn_span["name"]]
        assert arrived.trace_id.hex() == drawn_span["traceId"]
        assert arrived.span_id.hex() == drawn_span["spanId"]
        assert arrived.parent_span_id.hex() == drawn_span.get("parentSpanId", "")
        assert str(arrived.start_time_unix_nano) == drawn_span["startTimeUnixNano"]
        assert str(arrived.end_time_unix_nano) == drawn_span["endTimeUnixNano"]
    assert found["start vmm"].status == Status(code=Status.STATUS_CODE_ERROR, message="ValueError")
    assert not found["create c1"].HasField("status")
    assert found["agent ExecProcess"].parent_span_id == found["exec c1/e1"].span_id
    assert len({arrived.span_id for arrived in found.values()}) == len(found)
    attributes = {
        pair.key: pair.value.string_value for pair in receiver.requests[0].resource_spans[0].resource.attributes
    }
    assert attributes.pop("service.version")
    assert attributes.pop("host.name") == os.uname().nodename
    assert attributes == {
        "service.name": "pyshim",
        "sandbox.id": "pod1",
        "k8s.pod.name": "web",
        "k8s.namespace.name": "shop",
        "k8s.pod.uid": "u-1",
    }


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_the_child_has_no_rights_beside_its_socket() -> None:
    async with Receiver().listening() as receiver, exporting(receiver.url) as (sender, children):
        sender.ended(0, Span("create c1", NO_PARENT, 1, 2, ""))
        await receiver.came.wait()
        (running,) = children.alive
        status = status_of(running.pid)
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"


async def test_nothing_is_started_before_the_first_create_is_over() -> None:
    async with exporting(DEAD, flush_s=0.0) as (sender, children):
        sender.ended(1, Span("enter cgroups", 0, 1, 2, ""))
        await asyncio.sleep(0)
        assert children.alive == ()
        sender.ended(0, Span("create c1", NO_PARENT, 1, 2, ""))
        await until(lambda: children.alive)


async def test_a_receiver_that_is_not_there_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with exporting(DEAD) as (sender, _):
        for number, each in numbered(5):
            sender.ended(number, each)

    ((text, error),) = said(caplog)
    assert text == "spans are not exported"
    assert DEAD in error


async def test_a_receiver_that_does_not_answer_delays_only_the_flush() -> None:
    forever = asyncio.Event()

    async def silent() -> web.Response:
        await forever.wait()
        raise AssertionError("it never ends")

    async with Receiver(silent).listening() as receiver, exporting(receiver.url, flush_s=0.1) as (sender, _):
        sender.ended(0, Span("create c1", NO_PARENT, 1, 2, ""))
        await receiver.came.wait()
        for number, each in numbered(exporter.QUEUE_SPANS):
            sender.ended(1 + number, each)


async def test_a_flood_of_spans_is_cut_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()

    async with receiver.listening(), exporting(receiver.url) as (sender, _):
        for number, each in numbered(3 * exporter.QUEUE_SPANS):  # the loop does not run meanwhile
            sender.ended(number, each)

    arrived = list(receiver.spans())
    assert [each.name for each in arrived] == [f"span {number}" for number in range(exporter.QUEUE_SPANS)]
    assert [text for text, _ in said(caplog)] == ["spans are lost"]


async def test_without_its_child_an_exporter_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    async with Receiver().listening() as receiver, exporting(receiver.url) as (sender, children):
        sender.ended(0, Span("create c1", NO_PARENT, 1, 2, ""))
        await receiver.came.wait()
        (victim,) = children.alive
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: said(caplog))
        for number, each in numbered(10):
            sender.ended(1 + number, each)

    assert [text for text, _ in said(caplog)] == ["spans are not exported any more"]


async def test_an_interpreter_that_cannot_be_started_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python3")

    async with exporting(DEAD) as (sender, _):
        sender.ended(0, Span("create c1", NO_PARENT, 1, 2, ""))

    assert [text for text, _ in said(caplog)] == ["spans are not exported any more"]


# ---- what the child makes of answers


class Reports:
    """The child's work in this process: spans go in, reports come out."""

    def __init__(self, url: str) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        settings = child.ExportSettings(traces_url(url), TRACE_ID, {})
        self._task = asyncio.ensure_future(child._send(self._theirs, settings))

    async def give(self, spans: Iterable[tuple[int, Span]]) -> None:
        for number, each in spans:
            await asyncio.get_running_loop().sock_sendall(self._ours, json.dumps([number, *each]).encode())

    async def taken(self) -> None:
        """All that was given has been read."""
        await until(lambda: not int.from_bytes(fcntl.ioctl(self._ours, termios.TIOCOUTQ, bytes(4)), sys.byteorder))

    async def next(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(await asyncio.get_running_loop().sock_recv(self._ours, 4096))
        return report

    async def end(self) -> list[dict[str, Any]]:
        """Its reports until it had sent all it could."""
        self._ours.shutdown(socket.SHUT_WR)
        await self._task
        self._theirs.close()
        report = []
        while message := self._ours.recv(4096):
            report.append(json.loads(message))
        self._ours.close()
        return report


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LINGER_S", 0.0)
    monkeypatch.setattr(child, "RETRY_PAUSES_S", (0.01,))


REJECTED = ExportTraceServiceResponse()
REJECTED.partial_success.rejected_spans = 2
REJECTED.partial_success.error_message = "too old\n\x1b[31m" + "x" * 5000
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(b"", "disconnected", id="hangs up"),
        pytest.param(b"\x00\xff garbage\r\n\r\n", "400", id="not HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + b"a" * (1 << 20), "", id="a head of 1 MiB"),
        pytest.param(OK + b"\xff\xff\xff\xff", "not one of OTLP", id="not protobuf"),
        pytest.param(OK + b"<html>log in</html>", "not one of OTLP", id="a page"),
        pytest.param(OK + b"\x0a" + b"\xff" * (8 << 20), "not one of OTLP", id="8 MiB"),
        pytest.param(OK + REJECTED.SerializeToString(), "rejected 2 spans: too old [31mxxx", id="rejected"),
        pytest.param(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404 Not Found", id="404"),
        pytest.param(
            b"HTTP/1.1 307 x\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n", "status 307", id="redirect"
        ),
        pytest.param(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status 503 Busy", id="busy"),
    ],
)
async def test_a_bad_answer_is_named(answer: bytes, error: str) -> None:
    async with saying(answer) as url:
        reports = Reports(url)
        await reports.give(numbered(3))
        report = await reports.next()
        assert error in report["error"]
        assert len(report["error"]) < 1000
        assert report["error"].isprintable()
        assert await reports.end() == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_a_receivers_certificate_is_one_that_the_host_trusts(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
    for name, text in (("authority", made.authority), ("certificate", made.certificate), ("key", made.key)):
        (tmp_path / name).write_bytes(text)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "authority") if known else None)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusted)

    async with saying(OK, tls) as url:
        reports = Reports(url)
        await reports.give(numbered(3))
        report = await reports.end()
        assert ["certificate verify failed" in each["error"].lower() for each in report] == ([] if known else [True])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "body", [b"", ExportTraceServiceResponse().SerializeToString()], ids=["empty", "as a Collector"]
)
async def test_an_answer_without_complaint_is_not_reported(body: bytes) -> None:
    async with saying(OK + body) as url:
        reports = Reports(url)
        await reports.give(numbered(3))
        assert await reports.end() == []


@pytest.mark.usefixtures("at_once")
async def test_a_busy_receiver_is_asked_again() -> None:
    answers = iter([503])

    async def busy_once() -> web.Response:
        status = next(answers, 200)
        return web.Response(status=status) if status != 200 else await taken()

    async with Receiver(busy_once).listening() as receiver:
        reports = Reports(receiver.url)
        await reports.give(numbered(3))
        await until(lambda: len(receiver.requests) == 2)
        assert await reports.end() == []
        assert receiver.requests[0] == receiver.requests[1]
        assert len(receiver.requests) == 2


@pytest.mark.usefixtures("at_once")
async def test_the_end_of_a_failure_is_reported_with_what_it_cost() -> None:
    answers = iter([400, 400])

    async def refusing() -> web.Response:
        status = next(answers, 200)
        return web.Response(status=status) if status != 200 else await taken()

    async with Receiver(refusing).listening() as receiver:
        reports = Reports(receiver.url)

        async def one(number: int) -> None:
            await reports.give([(number, Span("s", NO_PARENT, 1, 2, ""))])
            await until(lambda: len(receiver.requests) > number)

        await one(0)
        assert "status 400" in (await reports.next())["error"]
        await one(1)  # reported once
        await one(2)
        assert await reports.next() == {"error": "", "lost": 2}
        assert await reports.end() == []


@pytest.mark.usefixtures("at_once")
async def test_spans_that_come_faster_than_they_are_taken_are_lost_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "QUEUE_SPANS", 20)
    monkeypatch.setattr(child, "BATCH_SPANS", 10)

    gate = asyncio.Event()

    async def slow() -> web.Response:
        await gate.wait()
        return await taken()

    async with Receiver(slow).listening() as receiver:
        reports = Reports(receiver.url)
        await reports.give(numbered(1))
        await receiver.came.wait()
        await reports.give(numbered(100))
        await reports.taken()
        gate.set()
        assert "faster than" in (await reports.next())["error"]
        await reports.end()
        assert len(list(receiver.spans())) == 1 + 20
        assert max(len(list(_spans(request))) for request in receiver.requests) == 10


def _spans(request: Any) -> Iterable[Any]:
    return request.resource_spans[0].scope_spans[0].spans


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://otel.example/tenant/", "https://otel.example/tenant/v1/traces"),
        ("http://tempo:4318/v1/traces", "http://tempo:4318/v1/traces"),
    ],
)
def test_the_path_of_traces_is_added(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
