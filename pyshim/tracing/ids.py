"""Ids of traces and spans: made from the records, so that the state and the receiver name a span alike.

Source: W3C Trace Context, version 00: hexadecimal, 16 bytes for a trace and 8 for a span.
"""

import hashlib


def trace_id(sandbox_id: str, start_ns: int) -> str:
    """The id of the trace whose first span began at `start_ns`."""
    return hashlib.sha256(f"{sandbox_id} {start_ns}".encode()).hexdigest()[:32]


def span_id(trace: str, number: int) -> str:
    return hashlib.sha256(f"{trace} {number}".encode()).hexdigest()[:16]


def traceparent(trace: str, number: int) -> str:
    """The header `traceparent` for another program. Its last field means that the span is sampled."""
    return f"00-{trace}-{span_id(trace, number)}-01"
