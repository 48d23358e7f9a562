"""Spans as one request of OTLP, and the meaning of the receiver's answer; protobuf ends here."""

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as pb

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
