"""`pyshim trace SANDBOX`: where the time went from Create to the first output, as text or OpenTelemetry's JSON."""

import click

from pyshim.model.errors import FailedPrecondition, Internal
from pyshim.model.observation import NO_PARENT, Span, spans_from_json
from pyshim.node.cli.output import examples, print_json
from pyshim.node.cli.sandboxes import sandbox_argument, sandbox_id, snapshot_of, state_dir_option
from pyshim.tracing import ids


@click.command(epilog=examples("pyshim trace 1a2b", "pyshim trace 1a2b --json > start.json"))
@sandbox_argument
@state_dir_option
@click.option("--json", "as_json", is_flag=True, help="OpenTelemetry's JSON (OTLP), for any tracing tool.")
def command(sandbox: str, state_dir: str, as_json: bool) -> int:
    """Show where the time went from Create to the first output."""
    found = sandbox_id(sandbox, state_dir)
    try:
        spans = spans_from_json(snapshot_of(found, state_dir).trace)
    except ValueError as error:
        raise Internal(f"read trace of sandbox {found!r}: {error}") from error
    if not spans:
        raise FailedPrecondition(f"read trace of sandbox {found!r}: nothing is recorded yet")
    if as_json:
        print_json(as_otlp(found, spans))
    else:
        print("\n".join(as_text(spans)))
    return 0


def as_text(spans: tuple[Span, ...]) -> list[str]:
    """One line per span, in order of their start: its start, its duration, and its name below that of its parent."""
    rows = [f"{'at':>10} {'took':>10}"]
    begin_ns = spans[0].start_ns
    for depth, span in _nested(spans):
        took = "" if span.end_ns == span.start_ns else f"{(span.end_ns - span.start_ns) / 1e6:.1f} ms"
        took = "unfinished" if not span.end_ns else took
        failed = f" (failed: {span.error})" if span.error else ""
        at = f"{(span.start_ns - begin_ns) / 1e6:.1f} ms"
        rows.append(f"{at:>10} {took:>10}  {'  ' * depth}{span.name}{failed}")
    return rows


def as_otlp(sandbox_id: str, spans: tuple[Span, ...]) -> dict[str, object]:
    """A TracesData message in OTLP's JSON encoding, with the ids that a receiver of the shim's spans has.

    Source: opentelemetry-proto, trace/v1/trace.proto, and the OTLP specification: ids are hexadecimal, times text.
    """
    trace_id = ids.trace_id(sandbox_id, spans[0].start_ns)
    rows: list[dict[str, object]] = [
        {
            "traceId": trace_id,
            "spanId": ids.span_id(trace_id, index),
            **({"parentSpanId": ids.span_id(trace_id, span.parent)} if span.parent != NO_PARENT else {}),
            "name": span.name,
            "kind": 1,
            "startTimeUnixNano": str(span.start_ns),
            "endTimeUnixNano": str(span.end_ns or span.start_ns),
            "status": {"code": 2, "message": span.error} if span.error else {},
        }
        for index, span in enumerate(spans)
    ]
    attributes = [
        {"key": "service.name", "value": {"stringValue": "pyshim"}},
        {"key": "sandbox.id", "value": {"stringValue": sandbox_id}},
    ]
    scope = {"scope": {"name": "pyshim"}, "spans": rows}
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}


def _nested(spans: tuple[Span, ...]) -> list[tuple[int, Span]]:
    """Each span with its depth, below its parent, in order of their start."""
    rows: list[tuple[int, Span]] = []

    def add(parent: int, depth: int) -> None:
        for index, span in sorted(enumerate(spans), key=lambda pair: pair[1].start_ns):
            if span.parent == parent:
                rows.append((depth, span))
                add(index, depth + 1)

    add(NO_PARENT, 0)
    return rows
