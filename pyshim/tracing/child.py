"""The program that `exporter.py` starts: takes spans on descriptor 3, and sends them in batches to a receiver of OTLP.

It waits for spans without waking. Everything has a limit: spans that wait, spans and time of a request, attempts, bytes
of an answer that are read, reports to the shim. It ends when its shim has, with what waited sent once.
Spans are encoded here: protobuf ends in this file.
"""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping

import aiohttp
import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as pb

from pyshim.host.python_child import SOCKET_FD
from pyshim.model.observation import NO_PARENT, Span
from pyshim.tracing import ids

SCOPE = "pyshim"
MAX_WORDS_CHARS = 200
"""Characters of a receiver's text that reach the log."""
_WHITE = " "


def request(trace_id: str, attributes: Mapping[str, str], spans: Iterable[tuple[int, Span]]) -> bytes:
    """An ExportTraceServiceRequest with these numbered spans."""
    resource = Resource(
        attributes=[KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in attributes.items()]
    )
    scope = pb.ScopeSpans(
        scope=InstrumentationScope(name=SCOPE), spans=[_span(trace_id, number, span) for number, span in spans]
    )
    group = pb.ResourceSpans(resource=resource, scope_spans=[scope])
    return ExportTraceServiceRequest(resource_spans=[group]).SerializeToString()


def _span(trace_id: str, number: int, span: Span) -> pb.Span:
    parent = "" if span.parent == NO_PARENT else ids.span_id(trace_id, span.parent)
    return pb.Span(
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(ids.span_id(trace_id, number)),
        parent_span_id=bytes.fromhex(parent),
        name=span.name,
        kind=pb.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        status=pb.Status(code=pb.Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
    )


def problem_in(answer: bytes) -> str:
    """The problem in the body of a receiver's "200 OK"; empty when all spans were taken.

    Simple receivers send an empty body.
    """
    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return "the answer is not one of OTLP"
    if partial.rejected_spans:
        return f"the receiver rejected {partial.rejected_spans} spans: {shown(partial.error_message)}"
    return ""


def shown(words: str) -> str:
    """A receiver's text, shortened and without control characters, for the log."""
    text = "".join(char if char.isprintable() else _WHITE for char in words[:MAX_WORDS_CHARS])
    return _WHITE.join(text.split())


NICENESS = 10
"""Lower than the priority of the pod's processes."""
MAX_MESSAGE_BYTES = 64 * 1024
QUEUE_SPANS = 4096
BATCH_SPANS = 512
"""The default of OpenTelemetry's SDKs."""
LINGER_S = 0.5
"""Seconds to wait for further spans, so that one request has all steps of a Start."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds for a whole exchange, however slowly the answer arrives: OTLP's default."""
RETRY_PAUSES_S = (1.0, 3.0)
MAX_ANSWER_BYTES = 64 * 1024
REPORT_EVERY_S = 60.0
"""Seconds between two reports of a failure, so that an unstable receiver does not fill the log."""
_AGAIN = frozenset({429, 502, 503, 504})
"""Statuses after which a request may be repeated. Source: the OTLP specification, "Retryable Response Codes"."""
_HEADERS = {"Content-Type": "application/x-protobuf", "User-Agent": "pyshim"}


class ExportSettings(msgspec.Struct, frozen=True):
    url: str
    trace_id: str
    attributes: Mapping[str, str]


class NotTaken(Exception):
    """The receiver did not take a request; `may_repeat` when it could take it later."""

    def __init__(self, reason: str, *, may_repeat: bool) -> None:
        super().__init__(reason)
        self.may_repeat = may_repeat


class SpanSender:
    def __init__(self, sock: socket.socket, settings: ExportSettings, session: aiohttp.ClientSession) -> None:
        self._socket = sock
        self._settings = settings
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Span]] = deque()
        self._came = asyncio.Event()
        self._ended = asyncio.Event()
        """The shim has closed its end."""
        self._lost = 0
        self._is_flooded = False
        """Spans were lost since the last report."""
        self._is_failing = False
        self._reported_s = float("-inf")

    async def run(self) -> None:
        """Runs until the shim has closed its end and its spans were sent to the receiver or are lost."""
        self._loop.add_reader(self._socket, self._take)
        while True:
            await self._came.wait()
            await self._ended_within(LINGER_S)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_SPANS))]
            taken = await self._export(batch) if batch else False
            if self._ended.is_set() and not taken:
                return
            if not self._waiting and not self._ended.is_set():
                self._came.clear()

    def _take(self) -> None:
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        self._came.set()
        if not message:
            self._loop.remove_reader(self._socket)
            self._ended.set()
            return
        number, *span = json.loads(message)
        if len(self._waiting) < QUEUE_SPANS:
            self._waiting.append((number, Span(*span)))
        else:
            self._lost += 1
            self._is_flooded = True

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _export(self, batch: list[tuple[int, Span]]) -> bool:
        """True when the receiver took the request."""
        body = request(self._settings.trace_id, self._settings.attributes, batch)
        for pause_s in (*RETRY_PAUSES_S, 0.0):
            try:
                problem = await self._post(body)
            except NotTaken as refused:
                if refused.may_repeat and pause_s and not await self._ended_within(pause_s):
                    continue
                self._lost += len(batch)
                self._report(str(refused))
                return False
            flood = "spans come faster than the receiver takes them" if self._is_flooded else ""
            self._is_flooded = False
            self._report(problem or flood)
            return True
        raise AssertionError("the last attempt is not repeated")

    async def _post(self, body: bytes) -> str:
        """The problem that the receiver names although it took the request, or "". Raises NotTaken."""
        try:
            async with self._session.post(
                self._settings.url, data=body, headers=_HEADERS, allow_redirects=False
            ) as reply:
                answer = await _beginning(reply.content)
                if reply.status != 200:
                    words = f"status {reply.status} {shown(reply.reason or '')}".strip()
                    raise NotTaken(f"'{self._settings.url}' answered {words}", may_repeat=reply.status in _AGAIN)
                return problem_in(answer)
        except TimeoutError:
            reason = f"no answer within {REQUEST_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = shown(str(error)) or type(error).__name__
        raise NotTaken(f"'{self._settings.url}': {reason}", may_repeat=True)

    def _report(self, problem: str) -> None:
        """Reports the first of several failures, and the first success after it, to the shim."""
        now_s = self._loop.time()
        if problem:
            if self._is_failing or now_s < self._reported_s + REPORT_EVERY_S:
                return
            self._reported_s = now_s
        elif not self._is_failing:
            return
        self._is_failing = bool(problem)
        try:
            self._socket.send(json.dumps({"error": problem, "lost": self._lost}).encode())
        except OSError:
            return  # the shim is ending, or has not read the former report


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """The answer's first `MAX_ANSWER_BYTES`."""
    answer = b""
    while len(answer) < MAX_ANSWER_BYTES and (chunk := await content.read(MAX_ANSWER_BYTES - len(answer))):
        answer += chunk
    return answer


async def _send(sock: socket.socket, settings: ExportSettings) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=1, force_close=True),  # an idle connection would wake this process
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    ) as session:
        await SpanSender(sock, settings, session).run()


def main() -> None:
    """Runs until the shim has closed the socket."""
    os.nice(NICENESS)
    with socket.socket(fileno=SOCKET_FD) as sock:
        first = sock.recv(MAX_MESSAGE_BYTES)
        if not first:
            return
        settings = msgspec.json.decode(first, type=ExportSettings)
        sock.setblocking(False)
        asyncio.run(_send(sock, settings))
