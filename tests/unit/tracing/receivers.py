"""Receivers of OTLP over HTTP on this machine: one decodes requests, one sends a given answer."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 60.0
Answer = Callable[[], Awaitable[web.StreamResponse]]


async def taken() -> web.Response:
    """As a Collector answers a request whose spans it has all taken."""
    return web.Response(body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf")


class Receiver:
    """Decodes requests with OpenTelemetry's own classes; `answer` says what each gets."""

    def __init__(self, answer: Answer = taken) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.came = asyncio.Event()
        self.answer = answer
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Receiver"]:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            (address,) = runner.addresses
            self.url = f"http://127.0.0.1:{address[1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        assert request.content_type == "application/x-protobuf"
        self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        self.came.set()
        return await self.answer()

    def spans(self) -> Iterator[Span]:
        for request in self.requests:
            for group in request.resource_spans:
                for scope in group.scope_spans:
                    yield from scope.spans


@asynccontextmanager
async def saying(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The base URL of a peer that answers every request with these bytes, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def until(holds: Callable[[], object]) -> None:
    """`holds` is true; the test's own limit ends a wait in vain."""
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)
