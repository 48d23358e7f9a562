"""The spans of a real pod, at a receiver of OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.waiting import eventually


@contextmanager
def receiver(requests: list[ExportTraceServiceRequest]) -> Iterator[str]:
    """The base URL of a receiver that adds to `requests`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.vm
def test_the_spans_of_a_containers_whole_life_arrive(ctr: Ctr, name: str, scratch: Path) -> None:
    requests: list[ExportTraceServiceRequest] = []
    with receiver(requests) as url:
        keys = {"enable_tracing": True, "otlp_endpoint": url}
        config = shim_config.with_keys(scratch, runtime=keys, agent={"enable_tracing": True})
        done = ctr.run(name, "cat", "/proc/cmdline", config=config, within_s=100)

        def found() -> dict[str, Span]:
            groups = [group for request in requests for group in request.resource_spans]
            return {span.name: span for group in groups for scope in group.scope_spans for span in scope.spans}

        eventually(lambda: f"delete {name}" in found(), what=lambda: f"the last span, after {list(found())}")

    assert " agent.trace=true" in done.out
    spans = found()
    parents = {span.span_id: span.name for span in spans.values()} | {b"": ""}
    within = {span.name: parents[span.parent_span_id] for span in spans.values()}
    assert within[f"create {name}"] == within[f"start {name}"] == within[f"delete {name}"] == ""
    assert within["start vmm"] == within["wait for agent"] == f"create {name}"
    assert within["agent CreateSandbox"] == "set up guest"
    assert within["agent StartContainer"] == f"start {name}"
    assert within["stop vm"] == within["leave cgroups"] == "end sandbox"
    assert len({span.trace_id for span in spans.values()}) == 1
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
