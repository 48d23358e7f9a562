"""The webhook over HTTPS: paths, limits and figures around `review.answer`."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pyshim.model.errors import InvalidArgument
from pyshim.node.webhook.certificate import Certificate
from pyshim.node.webhook.review import Action, PodClass, answer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
"""Bytes of a review: twice the largest object etcd takes by default, 1.5 MiB, and what is around it."""
BACKLOG = 512
"""Connections the kernel holds while this process is busy."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. The API server waits 10 s for an answer, unless its configuration says otherwise."""

    handshake_s: float = 10.0
    body_s: float = 10.0
    idle_s: float = 60.0
    """For a connection without a whole request, its first one included."""
    end_s: float = 10.0
    """For requests under way when the server is to end."""


class _Figures:
    def __init__(self, certificate_failures: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "pyshim_webhook_reviews", "Reviews, by outcome.", ("action", "outcome"), registry=self.registry
        )
        self.warnings = Counter("pyshim_webhook_warnings", "Warnings, by subject.", ("kind",), registry=self.registry)
        self.seconds = Histogram(
            "pyshim_webhook_decision_seconds",
            "From a whole request to its answer.",
            ("action",),
            registry=self.registry,
        )
        Gauge(
            "pyshim_webhook_certificate_failures",
            "Changes of the certificate since the start that could not be used.",
            registry=self.registry,
        ).set_function(certificate_failures)


class _UnderWay:
    """How many requests have begun and not ended."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_error: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def ended(self, *, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._none.wait()
        except TimeoutError:
            log.warning("requests abandoned", extra={"requests": self._count})


def _application(
    classes: Mapping[str, PodClass], figures: _Figures, under_way: _UnderWay, *, body_timeout_s: float
) -> web.Application:
    """POST /mutate and /validate, GET /healthz and /metrics."""

    def reviewer(action: Action) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def review(request: web.Request) -> web.Response:
            with under_way:
                return await reviewed(request)

        async def reviewed(request: web.Request) -> web.Response:
            try:
                async with asyncio.timeout(body_timeout_s):
                    body = await request.read()
            except TimeoutError:
                figures.reviews.labels(action, "late").inc()
                # The rest of the body may come yet, and would be taken for the next request.
                return web.Response(status=408, text="read body: too slow\n", headers={"Connection": "close"})
            except web.HTTPRequestEntityTooLarge:
                figures.reviews.labels(action, "too large").inc()
                raise
            started = time.monotonic()
            try:
                found = answer(body, classes, action)
            except InvalidArgument as error:
                figures.reviews.labels(action, "malformed").inc()
                return web.Response(status=400, text=f"{error}\n")
            figures.seconds.labels(action).observe(time.monotonic() - started)
            figures.reviews.labels(action, found.outcome).inc()
            for kind in found.kinds:
                figures.warnings.labels(kind).inc()
            if found.message:
                log.info("pod denied", extra={"reason": found.message})
            return web.json_response(found.document)

        return review

    async def healthy(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(figures.registry), headers={"Content-Type": _METRICS_TYPE})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/mutate", reviewer(Action.MUTATE))
    app.router.add_post("/validate", reviewer(Action.VALIDATE))
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/metrics", metrics)
    return app


@asynccontextmanager
async def serving(
    classes: Mapping[str, PodClass], certificate: Certificate, *, host: str, port: int, limits: Limits
) -> AsyncIterator[int]:
    """Yields the port. At the end new requests are refused and those under way have been answered."""
    under_way = _UnderWay()
    app = _application(classes, _Figures(lambda: certificate.failures), under_way, body_timeout_s=limits.body_s)
    runner = web.AppRunner(
        app, keepalive_timeout=limits.idle_s, shutdown_timeout=limits.end_s, access_log=None, handle_signals=False
    )
    await runner.setup()
    server = None
    try:
        assert runner.server is not None, "set up above"
        server = await asyncio.get_running_loop().create_server(
            runner.server,
            host,
            port,
            ssl=certificate.context,
            ssl_handshake_timeout=limits.handshake_s,
            backlog=BACKLOG,
        )
        yield server.sockets[0].getsockname()[1]
    finally:
        if server is not None:
            server.close()
            # aiohttp itself drops a body that is still arriving.
            await under_way.ended(within_s=limits.end_s)
        await runner.cleanup()


async def serve(
    classes: Mapping[str, PodClass], certificate: Certificate, *, host: str, port: int, limits: Limits
) -> None:
    """Serves until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with serving(classes, certificate, host=host, port=port, limits=limits) as bound:
        log.info("webhook serves", extra={"host": host, "port": bound, "classes": ",".join(sorted(classes))})
        await ended.wait()
        log.info("webhook ends")
