"""Spans: one within the other, inherited by tasks, bounded, and readable again."""

import asyncio
import itertools

import pytest

from pyshim.model.trace import MAX_SPANS, NO_PARENT, Span, Trace, mark, span, spans_from_json, traced


def counted() -> Trace:
    ticks = itertools.count(1)
    return Trace(lambda: next(ticks))


def test_spans_lie_within_each_other_and_in_the_tasks_that_were_made_in_them() -> None:
    trace = counted()

    @traced("inner")
    async def inner() -> int:
        mark("moment")
        return 5

    async def work() -> int:
        with span("outer"):
            return await asyncio.create_task(inner())

    assert asyncio.run(trace.of("all", work())) == 5
    assert trace.spans == [
        Span("all", NO_PARENT, 1, 7, ""),
        Span("outer", 0, 2, 6, ""),
        Span("inner", 1, 3, 5, ""),
        Span("moment", 2, 4, 4, ""),
    ]


def test_outside_of_a_trace_nothing_is_recorded() -> None:
    with span("alone"):
        mark("nothing")


def test_a_failure_ends_its_spans_and_is_named() -> None:
    trace = counted()

    async def work() -> None:
        with span("part"):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(trace.of("all", work()))
    assert [(s.name, s.error, s.end_ns > 0) for s in trace.spans] == [
        ("all", "ValueError", True),
        ("part", "ValueError", True),
    ]


def test_a_mark_is_told_and_the_number_of_spans_is_bounded() -> None:
    told: list[int] = []
    trace = Trace(lambda: 1, on_mark=lambda: told.append(1))

    async def work() -> None:
        for _ in range(2 * MAX_SPANS):
            with span("again"):
                pass
        mark("late")

    asyncio.run(trace.of("all", work()))
    assert len(trace.spans) == MAX_SPANS
    assert told == []


def test_a_saved_trace_reads_as_it_was() -> None:
    trace = counted()

    async def work() -> None:
        with span("part"):
            pass

    asyncio.run(trace.of("all", work()))
    assert spans_from_json(trace.as_json()) == tuple(trace.spans)
    assert spans_from_json({}) == ()


@pytest.mark.parametrize(
    "saved",
    [[], {"Spans": 1}, {"Spans": [["a", -1, 1, 2]]}, {"Spans": [["a", 0, 1, 2, ""]]}, {"Spans": [[1, -1, 1, 2, ""]]}],
)
def test_what_is_no_trace_is_refused(saved: object) -> None:
    with pytest.raises(ValueError, match=r"trace|span"):
        spans_from_json(saved)
