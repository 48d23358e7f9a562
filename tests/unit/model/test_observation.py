"""Spans: one within the other, inherited by tasks, bounded, and readable again."""

import asyncio
import itertools

import pytest

from pyshim.model.observation import MAX_SPANS, NO_PARENT, Span, Trace, context, mark, span, spans_from_json, traced


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

    with trace.of("all"):
        assert asyncio.run(work()) == 5
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

    with pytest.raises(ValueError, match="no"), trace.of("all"):
        asyncio.run(work())
    assert [(s.name, s.error, s.end_ns > 0) for s in trace.spans] == [
        ("all", "ValueError", True),
        ("part", "ValueError", True),
    ]


def test_a_mark_is_reported_and_the_number_of_spans_is_bounded() -> None:
    marks: list[int] = []
    trace = Trace(lambda: 1, on_mark=lambda: marks.append(1))

    async def work() -> None:
        for _ in range(2 * MAX_SPANS):
            with span("again"):
                pass
        mark("late")

    with trace.of("all"):
        asyncio.run(work())
    assert len(trace.spans) == MAX_SPANS
    assert marks == []


class Follower:
    def __init__(self) -> None:
        self.received: dict[int, Span] = {}

    def ended(self, number: int, span: Span) -> None:
        assert number not in self.received
        self.received[number] = span

    def context(self, number: int) -> str:
        return f"within {number}"


def test_a_follower_receives_earlier_and_later_spans() -> None:
    trace, follower = counted(), Follower()

    async def work() -> None:
        with span("before"):
            pass
        trace.follow(follower)
        assert follower.received == {1: Span("before", 0, 2, 3, "")}
        with span("after"):
            assert context() == "within 2"

    with trace.of("all"):
        asyncio.run(work())
    assert follower.received == dict(enumerate(trace.spans))


def test_a_follower_receives_spans_that_are_not_saved_and_their_inner_spans() -> None:
    trace, follower = counted(), Follower()

    async def work() -> None:
        with span("inner"):
            mark("moment")

    with trace.of("without follower", saved=False):
        asyncio.run(work())
    trace.follow(follower)
    with trace.of("with follower", saved=False):
        asyncio.run(work())

    assert trace.spans == []
    assert [(number - MAX_SPANS, s.name, s.parent) for number, s in sorted(follower.received.items())] == [
        (0, "with follower", NO_PARENT),
        (1, "inner", MAX_SPANS),
        (2, "moment", MAX_SPANS + 1),
    ]


def test_a_follower_receives_more_spans_than_are_saved() -> None:
    trace, follower = counted(), Follower()
    trace.follow(follower)

    async def work() -> None:
        for _ in range(2 * MAX_SPANS):
            with span("again"):
                pass

    with trace.of("all"):
        asyncio.run(work())
    assert len(trace.spans) == MAX_SPANS
    assert len(follower.received) == 2 * MAX_SPANS + 1
    assert {s.parent for s in follower.received.values()} == {NO_PARENT, 0}


def test_without_a_follower_there_is_no_context() -> None:
    async def work() -> None:
        assert context() == ""

    assert context() == ""
    with counted().of("all"):
        asyncio.run(work())


def test_a_saved_trace_reads_as_it_was() -> None:
    trace = counted()

    async def work() -> None:
        with span("part"):
            pass

    with trace.of("all"):
        asyncio.run(work())
    assert spans_from_json(trace.as_json()) == tuple(trace.spans)
    assert spans_from_json({}) == ()


@pytest.mark.parametrize(
    "saved",
    [[], {"Spans": 1}, {"Spans": [["a", -1, 1, 2]]}, {"Spans": [["a", 0, 1, 2, ""]]}, {"Spans": [[1, -1, 1, 2, ""]]}],
)
def test_a_document_that_is_no_trace_is_refused(saved: object) -> None:
    with pytest.raises(ValueError, match=r"trace|span"):
        spans_from_json(saved)
