"""The HTTP server of the node's endpoint, with kata-monitor's paths."""

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from html import escape
from typing import cast

from aiohttp import web

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.monitor.exposition import CONTENT_TYPE
from pyshim.node.monitor.scrape import SHIM_S, Scrapes
from pyshim.node.monitor.shims import Names, shim_answer, sockets_in

log = logging.getLogger(__name__)

PATHS = ("/metrics", "/sandboxes", "/agent-url")
MAX_CONNECTIONS = 64
"""Connections. Prometheus has one or two."""
SEND_S = 10.0
"""Seconds for an answer to be read, which Prometheus gives a scrape as a whole."""
PIECE_BYTES = 64 << 10
"""Bytes of an answer that a connection holds; callers share the rest, which for many sandboxes is tens of MiB."""
END_S = 3.0
"""Seconds for answers under way when the endpoint ends."""


class NodeMonitor:
    """The endpoint at `host` and `port`, from `open` to `close`. With `port` 0 it takes a free one."""

    def __init__(self, *, host: str, port: int, metrics_directory: str, roots: tuple[str, ...]) -> None:
        self._host = host
        self._port = port
        self._metrics_directory = metrics_directory
        self._roots = roots
        self._names = Names()
        self._scrapes = Scrapes()
        self._listener: asyncio.Server | None = None
        self._scrape: asyncio.Task[tuple[bytes, bytes]] | None = None
        """The scrape under way, which further requests share."""
        self._asked: dict[tuple[str, str], asyncio.Task[bytes]] = {}
        """The questions to shims under way, by socket and path, which further requests share."""
        self._under_way: set[object] = set()
        """The connections with a request."""
        self._unread: dict[web.RequestHandler, None] = {}
        """Those of them whose caller has yet to read; the one that has taken nothing for the longest time first."""
        app = web.Application(client_max_size=1024, middlewares=[self._sent_in_time])
        app.router.add_get("/", self._index, allow_head=False)
        app.router.add_get("/metrics", self._metrics, allow_head=False)
        app.router.add_get("/sandboxes", self._list, allow_head=False)
        app.router.add_get("/agent-url", self._agent_url, allow_head=False)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=END_S, keepalive_timeout=75.0, auto_decompress=False
        )

    async def open(self) -> tuple[str, int]:
        """The endpoint answers at the returned address. Raises FailedPrecondition."""
        try:
            await self._runner.setup()
            self._listener = await asyncio.get_running_loop().create_server(
                self._connection, self._host, self._port, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            await self.close()
            raise FailedPrecondition(f"listen at {self._host}:{self._port}: {error.strerror or error}") from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    @property
    def connections(self) -> int:
        """The number of present connections."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    def _connection(self) -> asyncio.Protocol:
        """Serves a new connection. When all are taken it takes the place of the oldest without a request, else of the
        one that has read nothing for the longest time, if any."""
        server = self._runner.server
        assert server is not None, "set up by open()"
        there = server.connections  # the oldest first
        if len(there) >= MAX_CONNECTIONS:
            idle = next((each for each in there if each not in self._under_way), next(iter(self._unread), None))
            if idle is None or len(there) >= 2 * MAX_CONNECTIONS:
                return _Refused()
            self._unread.pop(idle, None)
            idle.force_close()
        return server()

    @web.middleware
    async def _sent_in_time(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The whole answer is sent within SEND_S; a caller that reads more slowly loses its connection."""
        self._under_way.add(request.protocol)
        try:
            reply = await handler(request)
            assert isinstance(reply, web.Response)
            assert isinstance(reply.body, bytes)
            sent = web.StreamResponse(status=reply.status, headers=reply.headers)
            sent.content_length = len(reply.body)
            try:
                async with asyncio.timeout(SEND_S):
                    await self._send(request, sent, memoryview(reply.body))
            except (TimeoutError, ConnectionError):
                if request.transport is not None:
                    request.transport.abort()
            return sent
        finally:
            self._under_way.discard(request.protocol)
            self._unread.pop(request.protocol, None)

    async def _send(self, request: web.Request, reply: web.StreamResponse, body: memoryview) -> None:
        """Raises ConnectionError."""
        await reply.prepare(request)
        for begin in range(0, len(body), PIECE_BYTES):
            self._unread.pop(request.protocol, None)
            self._unread[request.protocol] = None
            await reply.write(body[begin : begin + PIECE_BYTES])
        await reply.write_eof()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        if self._scrape is not None:
            await cancel_all(self._scrape)
        await cancel_all(*self._asked.values())

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text="".join(f"{path}\n" for path in PATHS))

    async def _metrics(self, request: web.Request) -> web.Response:
        if "sandbox" in request.query:
            text = await self._of_sandbox(request, "/metrics")
            return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.create_task(self._scraped(), name="monitor/scrape")
        plain, zipped = await asyncio.shield(self._scrape)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=zipped, headers={"Content-Type": CONTENT_TYPE, "Content-Encoding": "gzip"})
        return web.Response(body=plain, headers={"Content-Type": CONTENT_TYPE})

    async def _scraped(self) -> tuple[bytes, bytes]:
        """The text of all shims, plain and compressed."""
        sockets = self._sockets()
        plain = (await self._scrapes.text(sockets, await self._names.of(sockets))).encode()
        return plain, await asyncio.to_thread(gzip.compress, plain, 1)

    def _sockets(self) -> dict[str, str]:
        return sockets_in(self._metrics_directory, self._roots)

    async def _list(self, request: web.Request) -> web.Response:
        """One id on each line, or links for a browser."""
        found = list(self._sockets())
        if "text/html" not in request.headers.get("Accept", ""):
            return web.Response(text="".join(f"{each}\n" for each in found))
        rows = "".join(
            f'<li>{escape(each)}: <a href="/metrics?sandbox={escape(each)}">metrics</a>, '
            f'<a href="/agent-url?sandbox={escape(each)}">agent-url</a></li>'
            for each in found
        )
        return web.Response(text=f"<h1>Sandboxes</h1><ul>{rows}</ul>", content_type="text/html")

    async def _agent_url(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._of_sandbox(request, "/agent-url") + b"\n", content_type="text/plain")

    def _question(self, path: str, target: str) -> asyncio.Task[bytes]:
        async def ask() -> bytes:
            return (await shim_answer(path, target, within_s=SHIM_S)).encode()

        key = (path, target)
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(ask(), name=f"monitor/ask{target}")
            self._asked[key] = task
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        return task

    async def _of_sandbox(self, request: web.Request, target: str) -> bytes:
        sandbox_id = request.query.get("sandbox", "")
        if not sandbox_id:
            raise web.HTTPBadRequest(text="parameter 'sandbox' is missing")
        path = self._sockets().get(sandbox_id)
        if path is None:
            raise web.HTTPNotFound(text="no such sandbox")
        try:
            return await asyncio.shield(self._question(path, target))
        except ShimError as error:
            raise web.HTTPBadGateway(text=str(error)) from error


class _Refused(asyncio.Protocol):
    """A connection above the limit: it is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


async def serve(monitor: NodeMonitor) -> None:
    """Serves until cancelled. Raises FailedPrecondition."""
    host, port = await monitor.open()
    log.info("monitor started", extra={"address": f"{host}:{port}"})
    try:
        await asyncio.Event().wait()
    finally:
        await monitor.close()
