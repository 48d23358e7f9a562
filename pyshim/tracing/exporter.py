"""The shim's side: a bounded queue of spans, and a child that sends them.

The child starts when the first Create is over, and ends with the shim. A slow or failing receiver costs the child time
and memory, not the shim. A span is one message on a non-blocking socket. A span above the limit of the queue is
lost and counted.
"""

import asyncio
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from pyshim import __version__
from pyshim.host.processes.children import Child, Children
from pyshim.host.processes.launch import Isolation
from pyshim.host.python_child import spawn_python
from pyshim.model.errors import ShimError
from pyshim.model.observation import NO_PARENT, Span, Trace
from pyshim.model.oci import pod_of
from pyshim.tracing import ids

log = logging.getLogger(__name__)

QUEUE_SPANS = 2048
"""Spans that wait in the shim: a pod of tens of containers has some hundred until the child runs."""
MAX_NAME_CHARS = 256
"""Characters of a span's name, in which callers' ids are."""
FLUSH_S = 2.0
"""Seconds at the shim's end for the last spans to leave; every call has been answered by then."""
_MAX_REPORT_BYTES = 4096
_POD_ATTRIBUTES = {"k8s.pod.name": "name", "k8s.namespace.name": "namespace", "k8s.pod.uid": "uid"}
"""Member of `PodName` by attribute. Source: OpenTelemetry's semantic conventions for Kubernetes."""
_CHILD = "pyshim.tracing.child"


class SpanExporter:
    """Sends the spans of one trace (`model.trace.Follower`)."""

    def __init__(
        self, children: Children, *, url: str, trace_id: str, attributes: Mapping[str, str], flush_s: float = FLUSH_S
    ) -> None:
        """Requests go to `url`; `attributes` describe the sandbox."""
        self._children = children
        self._trace_id = trace_id
        self._settings = json.dumps({"url": url, "trace_id": trace_id, "attributes": attributes}).encode()
        self._flush_s = flush_s
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._starting: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._is_closing = False
        self._is_over = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    # ---- the trace's side

    def ended(self, number: int, span: Span) -> None:
        if self._is_over:
            return
        if len(self._waiting) >= QUEUE_SPANS:
            self._lost += 1
            if self._lost == 1:
                log.warning("spans are lost", extra={"error": f"more than {QUEUE_SPANS} wait to be exported"})
            return
        name = span.name[:MAX_NAME_CHARS]
        self._waiting.append(json.dumps([number, name, *span[1:]]).encode())
        self._is_empty.clear()
        if self._socket is not None:
            self._send()
        elif span.parent == NO_PARENT:
            self._start()

    def context(self, number: int) -> str:
        return ids.traceparent(self._trace_id, number)

    # ---- the child's side

    def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._started(), name="trace/start")

    async def _started(self) -> None:
        # Without capabilities, since it reads the answers of a remote server.
        wanted = spawn_python(
            self._children, _CHILD, kind=socket.SOCK_SEQPACKET, isolation=Isolation(capabilities=frozenset())
        )
        try:
            self._child, ours = await wanted
        except (ShimError, OSError) as error:
            self._give_up(str(error))
            return
        self._socket = ours
        self._waiting.appendleft(self._settings)
        asyncio.get_running_loop().add_reader(ours, self._on_report)
        self._send()

    def _send(self) -> None:
        """Sends the waiting spans, or as many as the socket takes now and the others when it is writable."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                self._socket.send(self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            loop.add_writer(self._socket, self._send)
            return
        except OSError as error:
            self._give_up(f"the exporting process is gone: {error.strerror}")
            return
        loop.remove_writer(self._socket)
        self._is_empty.set()

    def _on_report(self) -> None:
        """Logs the child's report of a failure or of success, and its end."""
        assert self._socket is not None, "its reader is removed with it"
        try:
            report = self._socket.recv(_MAX_REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            report = b""
        if not report and self._is_closing:
            self._over()
            return
        if not report:
            self._give_up("the exporting process has ended; its last output is in the log, as stderr")
            return
        fields = json.loads(report)
        if fields["error"]:
            log.warning("spans are not exported", extra=fields)
        else:
            log.info("spans are exported again", extra={"lost": fields["lost"]})

    def _give_up(self, reason: str) -> None:
        """Spans are neither sent nor queued any more."""
        if self._is_over:
            return
        log.warning("spans are not exported any more", extra={"error": reason, "lost": self._lost + len(self._waiting)})
        self._over()

    def _over(self) -> None:
        self._is_over = True
        self._waiting.clear()
        self._is_empty.set()
        if self._socket is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Child and queue are gone; the receiver had `flush_s` to take the last spans. Idempotent."""
        self._is_closing = True
        try:
            async with asyncio.timeout(self._flush_s):
                await self._flush()
        except TimeoutError:
            log.info("last spans were not exported", extra={"waiting": len(self._waiting)})
        self._over()
        if self._starting is not None:
            await asyncio.wait([self._starting])
            self._over()
        if self._child is not None:
            try:
                await self._child.end()
            except ShimError as error:
                log.warning("exporting process left behind", extra={"error": str(error)})

    async def _flush(self) -> None:
        if self._waiting and not self._is_over:
            self._start()
        if self._starting is not None:
            await asyncio.shield(self._starting)
        await self._is_empty.wait()
        if self._socket is not None and self._child is not None:
            with suppress(OSError):  # it has just ended by itself
                self._socket.shutdown(socket.SHUT_WR)
            await self._child.wait()
        while self._socket is not None:  # its last reports, and its end
            self._on_report()


def export(
    children: Children, trace: Trace, *, endpoint: str, sandbox_id: str, annotations: Mapping[str, str]
) -> SpanExporter:
    """An exporter that follows `trace`, which has begun, with the base URL of a receiver."""
    pod = pod_of(annotations)
    attributes = {
        "service.name": "pyshim",
        "service.version": __version__,
        "host.name": os.uname().nodename,
        "sandbox.id": sandbox_id,
        **{attribute: value for attribute, member in _POD_ATTRIBUTES.items() if (value := getattr(pod, member))},
    }
    trace_id = ids.trace_id(sandbox_id, trace.spans[0].start_ns)
    exporter = SpanExporter(children, url=traces_url(endpoint), trace_id=trace_id, attributes=attributes)
    trace.follow(exporter)
    return exporter


def traces_url(endpoint: str) -> str:
    """The URL for spans of the receiver with this base URL. Source: OpenTelemetry, "OTLP Exporter Configuration"."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
