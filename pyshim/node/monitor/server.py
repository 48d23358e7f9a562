"""The HTTP server of the node's endpoint, with kata-monitor's paths."""

import asyncio
import gzip
import logging
from html import escape

from aiohttp import web

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.monitor.exposition import CONTENT_TYPE
from pyshim.node.monitor.scrape import SHIM_S, Scrapes
from pyshim.node.monitor.shims import Names, shim_answer, sockets_in

log = logging.getLogger(__name__)

PATHS = ("/metrics", "/sandboxes", "/agent-url")
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
        self._scrape: asyncio.Task[tuple[bytes, bytes]] | None = None
        """The scrape under way, which further requests share."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/", self._index, allow_head=False)
        app.router.add_get("/metrics", self._metrics, allow_head=False)
        app.router.add_get("/sandboxes", self._list, allow_head=False)
        app.router.add_get("/agent-url", self._agent_url, allow_head=False)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S, keepalive_timeout=75.0)

    async def open(self) -> tuple[str, int]:
        """The endpoint answers at the returned address. Raises FailedPrecondition."""
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.close()
            raise FailedPrecondition(f"listen at {self._host}:{self._port}: {error.strerror or error}") from error
        host, port = self._runner.addresses[0][:2]
        return host, port

    async def close(self) -> None:
        await self._runner.cleanup()
        if self._scrape is not None:
            await cancel_all(self._scrape)

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text="".join(f"{path}\n" for path in PATHS))

    async def _metrics(self, request: web.Request) -> web.Response:
        if "sandbox" in request.query:
            text = await self._of_sandbox(request, "/metrics")
            return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
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
        return web.Response(text=f"{await self._of_sandbox(request, '/agent-url')}\n")

    async def _of_sandbox(self, request: web.Request, target: str) -> str:
        sandbox_id = request.query.get("sandbox", "")
        if not sandbox_id:
            raise web.HTTPBadRequest(text="parameter 'sandbox' is missing")
        path = self._sockets().get(sandbox_id)
        if path is None:
            raise web.HTTPNotFound(text="no such sandbox")
        try:
            return await shim_answer(path, target, within_s=SHIM_S)
        except ShimError as error:
            raise web.HTTPBadGateway(text=str(error)) from error


async def serve(monitor: NodeMonitor) -> None:
    """Serves until cancelled. Raises FailedPrecondition."""
    host, port = await monitor.open()
    log.info("monitor started", extra={"address": f"{host}:{port}"})
    try:
        await asyncio.Event().wait()
    finally:
        await monitor.close()
