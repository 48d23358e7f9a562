"""What took how long from Create to the first output: spans, one within the other, kept with the sandbox's state.

`span` and `traced` record into the trace that the running task was given by `Trace.of`, and into none outside of
one. Tasks inherit it from the task that makes them, so a call's whole work is in its caller's span.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_SPANS = 256
"""A pod may have any number of containers; the first ones are what is asked about."""
NO_PARENT = -1


class Span(NamedTuple):
    name: str
    parent: int
    """The index of the span this one is within; NO_PARENT for none."""
    start_ns: int
    end_ns: int
    """0 while it lasts; the start of a mark."""
    error: str
    """The kind of exception that ended it; empty when none did."""


class Trace:
    def __init__(self, clock_ns: Callable[[], int], on_mark: Callable[[], None] = lambda: None) -> None:
        """`clock_ns` tells nanoseconds since the epoch; `on_mark` hears of a mark, which ends nothing by itself."""
        self._clock_ns = clock_ns
        self._on_mark = on_mark
        self.spans: list[Span] = []
        self._json: Mapping[str, object] | None = None
        """What `as_json` has said, as long as it is true."""

    async def of(self, name: str, work: Awaitable[T]) -> T:
        """The result of `work`, which is a span of this name; it and the tasks it makes record into this trace.

        Without a name nothing is recorded.
        """
        if not name:
            return await work
        with self._within(name, NO_PARENT):
            return await work

    def as_json(self) -> Mapping[str, object]:
        """What `spans_from_json` reads."""
        if self._json is None:
            self._json = {"Spans": [list(span) for span in self.spans]} if self.spans else {}
        return self._json

    @contextmanager
    def _within(self, name: str, parent: int) -> Iterator[None]:
        if len(self.spans) >= MAX_SPANS:
            yield
            return
        index = len(self.spans)
        self.spans.append(Span(name, parent, self._clock_ns(), 0, ""))
        self._json = None
        token = _current.set((self, index))
        error = ""
        try:
            yield
        except BaseException as exc:
            error = type(exc).__name__
            raise
        finally:
            _current.reset(token)
            self.spans[index] = self.spans[index]._replace(end_ns=self._clock_ns(), error=error)
            self._json = None

    def _mark(self, name: str, parent: int) -> None:
        if len(self.spans) < MAX_SPANS:
            now_ns = self._clock_ns()
            self.spans.append(Span(name, parent, now_ns, now_ns, ""))
            self._json = None
            self._on_mark()


_current: ContextVar[tuple[Trace, int] | None] = ContextVar("trace", default=None)


@contextmanager
def span(name: str) -> Iterator[None]:
    """What runs within is a span of the trace at hand, if there is one."""
    current = _current.get()
    if current is None:
        yield
        return
    trace, parent = current
    with trace._within(name, parent):
        yield


async def step(name: str, work: Awaitable[T]) -> T:
    """The result of `work`, which is a span of the trace at hand."""
    with span(name):
        return await work


def mark(name: str) -> None:
    """This moment is in the trace at hand, if there is one."""
    current = _current.get()
    if current is not None:
        current[0]._mark(name, current[1])


def traced(
    name: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Every call of the coroutine function is a span."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return await function(*args, **kwargs)

        return run

    return decorate


def spans_from_json(saved: object) -> tuple[Span, ...]:
    """The spans `Trace.as_json` wrote; raises ValueError for anything else."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("Spans", []), list):
        raise ValueError("a trace is an object with a list 'Spans'")
    spans: list[Span] = []
    for item in saved.get("Spans", []):
        match item:
            case [str(name), int(parent), int(start_ns), int(end_ns), str(error)] if parent < len(spans):
                spans.append(Span(name, max(parent, NO_PARENT), start_ns, end_ns, error))
            case _:
                raise ValueError(f"span {len(spans)} is not name, parent, start, end and error")
    return tuple(spans)
