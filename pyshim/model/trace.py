"""Nested spans from Create to the first output: the duration of each step. They are saved with the sandbox's state.

`span` and `traced` record into the trace whose `Trace.of` surrounds them; without one they record nothing.
Tasks inherit the trace from the task that makes them, so a call's whole work is in its caller's span.

A follower receives every span when it ends, also those that are not saved: execs, the end of a sandbox, calls of the
agent. Without a follower those cost nothing.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_SPANS = 256
"""Spans saved with the state: enough for the first containers of a pod, which may have any number. Spans that are not
saved have numbers from here on."""
NO_PARENT = -1


class Span(NamedTuple):
    name: str
    parent: int
    """The number of the parent span, NO_PARENT for none. A saved span's number is its index."""
    start_ns: int
    end_ns: int
    """0 while it lasts; the start of a mark."""
    error: str
    """The kind of exception that ended it; empty when none did."""


class Follower(Protocol):
    """Receives a trace's spans. Must neither wait nor raise: it is called in the middle of a pod's work."""

    def ended(self, number: int, span: Span) -> None:
        """`span` has ended; no other span of the trace has its number."""

    def context(self, number: int) -> str:
        """W3C's `traceparent`, which makes this span the parent of another program's spans."""


class Trace:
    def __init__(self, clock_ns: Callable[[], int], on_mark: Callable[[], None] = lambda: None) -> None:
        """`clock_ns` returns nanoseconds since the epoch; `on_mark` is called at a mark."""
        self._clock_ns = clock_ns
        self._on_mark = on_mark
        self.spans: list[Span] = []
        self._json: Mapping[str, object] | None = None
        """The last result of `as_json`, until it changes."""
        self._follower: Follower | None = None
        self._unkept = MAX_SPANS
        """The number of the next span that is not saved."""

    def follow(self, follower: Follower) -> None:
        """`follower` receives every span, including those that have ended already. A later follower replaces it."""
        self._follower = follower
        for number, ended in enumerate(self.spans):
            if ended.end_ns:
                follower.ended(number, ended)

    def of(self, name: str, *, kept: bool = True) -> AbstractContextManager[None]:
        """The block is a span of this name; it and the tasks it makes record into this trace.

        If it is not `kept`, neither it nor its inner spans are saved: only a follower receives them.
        """
        return self._within(name, NO_PARENT, kept)

    def as_json(self) -> Mapping[str, object]:
        """The document that `spans_from_json` reads."""
        if self._json is None:
            self._json = {"Spans": [list(span) for span in self.spans]} if self.spans else {}
        return self._json

    def context(self, number: int) -> str:
        """`Follower.context`; empty without a follower."""
        return self._follower.context(number) if self._follower is not None else ""

    @contextmanager
    def _within(self, name: str, parent: int, kept: bool = True) -> Iterator[None]:
        kept = self._keeps(kept, parent)
        if not kept and self._follower is None:
            yield
            return
        began = Span(name, parent, self._clock_ns(), 0, "")
        number = self._number(began, kept)
        token = _current.set((self, number))
        error = ""
        try:
            yield
        except BaseException as exc:
            error = type(exc).__name__
            raise
        finally:
            _current.reset(token)
            over = began._replace(end_ns=self._clock_ns(), error=error)
            if kept:
                self.spans[number] = over
                self._json = None
            if self._follower is not None:
                self._follower.ended(number, over)

    def _mark(self, name: str, parent: int) -> None:
        kept = self._keeps(True, parent)
        if not kept and self._follower is None:
            return
        now_ns = self._clock_ns()
        moment = Span(name, parent, now_ns, now_ns, "")
        number = self._number(moment, kept)
        if self._follower is not None:
            self._follower.ended(number, moment)
        if kept:
            self._on_mark()

    def _keeps(self, wanted: bool, parent: int) -> bool:
        return wanted and parent < MAX_SPANS and len(self.spans) < MAX_SPANS

    def _number(self, began: Span, kept: bool) -> int:
        """The span's number; with `kept` it is in the list."""
        if kept:
            self.spans.append(began)
            self._json = None
            return len(self.spans) - 1
        self._unkept += 1
        return self._unkept - 1


_current: ContextVar[tuple[Trace, int] | None] = ContextVar("trace", default=None)


@contextmanager
def span(name: str, *, kept: bool = True) -> Iterator[None]:
    """The block is a span of the current trace, if there is one; `kept` as in `Trace.of`."""
    current = _current.get()
    if current is None:
        yield
        return
    trace, parent = current
    with trace._within(name, parent, kept):
        yield


def context() -> str:
    """`Follower.context` of the current span; empty without a followed trace."""
    current = _current.get()
    return current[0].context(current[1]) if current is not None else ""


async def step(name: str, work: Awaitable[T]) -> T:
    """The result of `work`, which is a span of the current trace."""
    with span(name):
        return await work


def mark(name: str) -> None:
    """This moment is in the current trace, if there is one."""
    current = _current.get()
    if current is not None:
        current[0]._mark(name, current[1])


def traced(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
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
