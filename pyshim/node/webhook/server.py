"""The webhook over HTTPS: paths, limits and figures around `review.answer`.

Memory is limited whatever callers do: there are at most `MAX_CONNECTIONS`, and `LARGE_BODIES` bodies above
`SMALL_BODY_BYTES` are read at a time. Further large bodies wait unread, small ones do not.
"""

import asyncio
import gc
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial

import msgspec
from aiohttp import web

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import InvalidArgument
from pyshim.model.observation import Durations
from pyshim.monitor.exposition import CONTENT_TYPE, Family, Sample, gauge, text_of
from pyshim.monitor.shim_metrics import durations_family
from pyshim.node.webhook.certificate import Certificate
from pyshim.node.webhook.connections import Connections
from pyshim.node.webhook.judge import PodClass
from pyshim.node.webhook.review import Action, answer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""Bytes of a review: a hundred times a large pod and its former state."""
SMALL_BODY_BYTES = 256 << 10
"""Bytes of a body that does not wait: a hundred times a usual review."""
LARGE_BODIES = 3
"""The number of larger bodies that are read at a time."""
LINGERING_S = 1.0
"""Seconds in which the rest of a refused body is read, so that the caller reads the answer."""
BACKLOG = 512
"""Connections that the kernel queues while this process is busy."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. The API server waits 10 s for an answer, unless its configuration says otherwise."""

    handshake_s: float = 10.0
    body_s: float = 10.0
    idle_s: float = 60.0
    """Seconds for a connection without a whole request."""
    end_s: float = 10.0
    """Seconds for requests under way when the server ends."""


class _Figures:
    def __init__(self, certificate: Certificate) -> None:
        self.reviews: Counter[tuple[str, str]] = Counter()
        """By action and outcome."""
        self.warnings: Counter[str] = Counter()
        self.decisions = Durations()
        self._certificate = certificate

    def text(self) -> str:
        reviews = (Sample({"action": a, "outcome": outcome}, n) for (a, outcome), n in self.reviews.items())
        warnings = (Sample({"kind": kind}, n) for kind, n in self.warnings.items())
        return text_of(
            (
                Family("pyshim_webhook_reviews_total", "counter", "Reviews, by their outcome.", tuple(reviews)),
                Family("pyshim_webhook_warnings_total", "counter", "Warnings, by their subject.", tuple(warnings)),
                durations_family(
                    "pyshim_webhook_decision_seconds",
                    "From a whole request to its answer.",
                    self.decisions.all(),
                    in_seconds=True,
                ),
                gauge(
                    "pyshim_webhook_certificate_failures",
                    "Changes of the certificate since the start that could not be used.",
                    self._certificate.failures,
                ),
                gauge(
                    "pyshim_webhook_certificate_not_after_timestamp_seconds",
                    "The end of the certificate in use.",
                    self._certificate.not_after_s,
                ),
            )
        )


class _UnderWay:
    """The connections with a request that has begun and not ended."""

    def __init__(self) -> None:
        self._protocols: set[object] = set()
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def on(self, protocol: object) -> Iterator[None]:
        self._protocols.add(protocol)
        self._none.clear()
        try:
            yield
        finally:
            self._protocols.discard(protocol)
            if not self._protocols:
                self._none.set()

    def has(self, protocol: object) -> bool:
        return protocol in self._protocols

    async def ended(self, *, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._none.wait()
        except TimeoutError:
            log.warning("requests abandoned", extra={"requests": len(self._protocols)})


class _Webhook:
    """Handles POST /mutate and /validate, GET /healthz and /metrics."""

    def __init__(self, classes: Mapping[str, PodClass], figures: _Figures, *, body_timeout_s: float) -> None:
        self.under_way = _UnderWay()
        self._classes = classes
        self._figures = figures
        self._body_timeout_s = body_timeout_s
        self._large_bodies = asyncio.Semaphore(LARGE_BODIES)
        # One thread: reviews are decoded one at a time, so their objects' memory is that of one, and other connections
        # are served meanwhile.
        self._decider = ThreadPoolExecutor(1, "webhook/decide")

    def close(self) -> None:
        """No further review is decided."""
        self._decider.shutdown(wait=False, cancel_futures=True)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/mutate", partial(self._reviewed, Action.MUTATE))
        app.router.add_post("/validate", partial(self._reviewed, Action.VALIDATE))
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _reviewed(self, action: Action, request: web.Request) -> web.Response:
        if "Content-Encoding" in request.headers:  # no API server compresses a review, and 200 MiB can be 200 KiB
            self._figures.reviews[action, "malformed"] += 1
            return web.Response(status=415, text="read body: it is compressed\n", headers={"Connection": "close"})
        with self.under_way.on(request.protocol):
            try:
                body = await self._body_of(request)
            except TimeoutError:
                self._figures.reviews[action, "late"] += 1
                # The rest of the body may still arrive, and would be read as the next request.
                return web.Response(status=408, text="read body: too slow\n", headers={"Connection": "close"})
            except OSError:  # a reset, or what TLS makes of one
                self._figures.reviews[action, "lost"] += 1
                return web.Response(status=400)
            except web.HTTPRequestEntityTooLarge:
                self._figures.reviews[action, "too large"] += 1
                raise
            return await self._answered(action, body)

    async def _body_of(self, request: web.Request) -> bytes:
        """Raises TimeoutError, OSError, HTTPRequestEntityTooLarge."""
        is_small = request.content_length is not None and request.content_length <= SMALL_BODY_BYTES
        async with asyncio.timeout(self._body_timeout_s), nullcontext() if is_small else self._large_bodies:
            return await request.read()

    async def _answered(self, action: Action, body: bytes) -> web.Response:
        started = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._decider, answer, body, self._classes, action)
        except InvalidArgument as error:
            self._figures.reviews[action, "malformed"] += 1
            return web.Response(status=400, text=f"{error}\n")
        self._figures.decisions.took(action, time.monotonic() - started)
        self._figures.reviews[action, found.outcome] += 1
        self._figures.warnings.update(found.kinds)
        if found.message:
            log.info("pod denied", extra={"reason": found.message})
        return web.json_response(found.document)

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._figures.text(), headers={"Content-Type": CONTENT_TYPE})


@asynccontextmanager
async def serving(
    classes: Mapping[str, PodClass], certificate: Certificate, *, host: str, port: int, limits: Limits
) -> AsyncIterator[int]:
    """Yields the port. After the block, new requests are refused and those under way were answered."""
    webhook = _Webhook(classes, _Figures(certificate), body_timeout_s=limits.body_s)
    runner = web.AppRunner(
        webhook.application(),
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=limits.end_s,
        lingering_time=LINGERING_S,
        access_log=None,
        handle_signals=False,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None, "set up above"
    connections = Connections(runner.server, webhook.under_way.has, certificate.context, handshake_s=limits.handshake_s)
    try:
        with _listening(host, port) as listener:
            accepting = asyncio.ensure_future(connections.accept(listener))
            try:
                yield listener.getsockname()[1]
            finally:
                await cancel_all(accepting)
        await connections.close()
        # aiohttp itself drops a body that is still arriving.
        await webhook.under_way.ended(within_s=limits.end_s)
    finally:
        await runner.cleanup()
        webhook.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


async def serve(classes: Mapping[str, PodClass], certificate: Certificate, *, host: str, port: int) -> None:
    """Serves until cancelled."""
    async with serving(classes, certificate, host=host, port=port, limits=Limits()) as bound:
        gc.freeze()  # a collection looks only at what connections have made
        log.info("webhook serves", extra={"host": host, "port": bound, "classes": ",".join(sorted(classes))})
        await asyncio.Event().wait()
