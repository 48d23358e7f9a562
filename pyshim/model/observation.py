"""What a shim measures of its pod: the trace of its steps, the durations of calls, and the figures of its metrics.

`span` and `traced` record into the trace of the surrounding `Trace.of`; outside of one they record nothing. A task
inherits the trace of the task that made it, so that all work of a call is within the caller's span.

Spans are saved with the sandbox's state, except those of execs, of calls to the agent and of the sandbox's end. These
only go to the trace's follower, and are not recorded without one.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

P = ParamSpec("P")
T = TypeVar("T")

MAX_SPANS = 256
"""The most spans that are saved: enough for the first containers of a pod. The others are numbered from here on."""
NO_PARENT = -1


class Span(NamedTuple):
    name: str
    parent: int
    """The number of the parent span, or NO_PARENT. A saved span's number is its index in `Trace.spans`."""
    start_ns: int
    end_ns: int
    """0 before the span's end; a mark's `start_ns`."""
    error: str
    """The class name of the exception that ended the span; empty without one."""


class Follower(Protocol):
    """Receives every span of a trace. It must not block or raise: it is called in the middle of a pod's work."""

    def ended(self, number: int, span: Span) -> None:
        """Takes a span that has ended. `number` is unique in the trace."""

    def context(self, number: int) -> str:
        """The W3C `traceparent` by which another program makes this span the parent of its spans."""


class Trace:
    def __init__(self, clock_ns: Callable[[], int], on_mark: Callable[[], None] = lambda: None) -> None:
        """`clock_ns` returns nanoseconds since the epoch. `on_mark` is called at each mark."""
        self._clock_ns = clock_ns
        self._on_mark = on_mark
        self.spans: list[Span] = []
        """The spans to save."""
        self._json: Mapping[str, object] | None = None
        """The result of `as_json`; None after a change of `spans`."""
        self._follower: Follower | None = None
        self._next_unsaved = MAX_SPANS
        """The number of the next span that is not saved."""

    def follow(self, follower: Follower) -> None:
        """Passes every span to `follower`, first those of `spans` that have ended. It replaces an earlier follower."""
        self._follower = follower
        for number, ended in enumerate(self.spans):
            if ended.end_ns:
                follower.ended(number, ended)

    def of(self, name: str, *, saved: bool = True) -> AbstractContextManager[None]:
        """Records the block as a span of this trace; inner spans and those of the block's tasks belong to it, too.

        They are saved only if `saved` is true.
        """
        return self._within(name, NO_PARENT, saved)

    def as_json(self) -> Mapping[str, object]:
        """The document that `spans_from_json` reads."""
        if self._json is None:
            self._json = {"Spans": [list(span) for span in self.spans]} if self.spans else {}
        return self._json

    def context(self, number: int) -> str:
        """The result of `Follower.context`; empty without a follower."""
        return self._follower.context(number) if self._follower is not None else ""

    @contextmanager
    def _within(self, name: str, parent: int, saved: bool = True) -> Iterator[None]:
        saved = self._is_saved(saved, parent)
        if not saved and self._follower is None:
            yield
            return
        began = Span(name, parent, self._clock_ns(), 0, "")
        number = self._number(began, saved)
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
            if saved:
                self.spans[number] = over
                self._json = None
            if self._follower is not None:
                self._follower.ended(number, over)

    def _mark(self, name: str, parent: int) -> None:
        saved = self._is_saved(True, parent)
        if not saved and self._follower is None:
            return
        now_ns = self._clock_ns()
        moment = Span(name, parent, now_ns, now_ns, "")
        number = self._number(moment, saved)
        if self._follower is not None:
            self._follower.ended(number, moment)
        if saved:
            self._on_mark()

    def _is_saved(self, wanted: bool, parent: int) -> bool:
        return wanted and parent < MAX_SPANS and len(self.spans) < MAX_SPANS

    def _number(self, began: Span, saved: bool) -> int:
        """The new span's number. A saved span is appended to `spans`."""
        if saved:
            self.spans.append(began)
            self._json = None
            return len(self.spans) - 1
        self._next_unsaved += 1
        return self._next_unsaved - 1


_current: ContextVar[tuple[Trace, int] | None] = ContextVar("trace", default=None)


@contextmanager
def span(name: str, *, saved: bool = True) -> Iterator[None]:
    """Records the block as a span of the current trace, if there is one. `saved` as in `Trace.of`."""
    current = _current.get()
    if current is None:
        yield
        return
    trace, parent = current
    with trace._within(name, parent, saved):
        yield


def context() -> str:
    """The `traceparent` of the current span; empty without a trace that has a follower."""
    current = _current.get()
    return current[0].context(current[1]) if current is not None else ""


async def step(name: str, work: Awaitable[T]) -> T:
    """Awaits `work` as a span of the current trace and returns its result."""
    with span(name):
        return await work


def mark(name: str) -> None:
    """Records this moment as a span without duration in the current trace, if there is one."""
    current = _current.get()
    if current is not None:
        current[0]._mark(name, current[1])


def traced(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorator: every call of the coroutine function is a span of the current trace."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return await function(*args, **kwargs)

        return run

    return decorate


def spans_from_json(saved: object) -> tuple[Span, ...]:
    """The spans that `Trace.as_json` wrote. Raises ValueError for any other document."""
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


BOUNDS_MS = tuple(2**exponent for exponent in range(10))
"""The buckets' upper bounds in milliseconds: 1, 2, 4, ... 512, as Kata's."""


class Duration(NamedTuple):
    counts: tuple[int, ...]
    """The number of calls in each bucket of BOUNDS_MS, and last of those above all bounds."""
    sum_ms: float


class Durations:
    """A histogram for each action: the name of a call, of which there are a few dozen."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_ms: dict[str, float] = {}

    def took(self, action: str, seconds: float) -> None:
        milliseconds = seconds * 1000
        counts = self._counts.get(action)
        if counts is None:
            counts = self._counts[action] = [0] * (len(BOUNDS_MS) + 1)
            self._sums_ms[action] = 0.0
        counts[bisect_left(BOUNDS_MS, milliseconds)] += 1
        self._sums_ms[action] += milliseconds

    def all(self) -> Mapping[str, Duration]:
        """The histograms so far, by action."""
        return {action: Duration(tuple(counts), self._sums_ms[action]) for action, counts in self._counts.items()}


QUICK = frozenset({"grpc.CheckRequest", "grpc.GetMetricsRequest"})
"""Calls whose duration does not depend on the guest's containers."""
_LATEST = 128
"""The number of latest quick calls of which the percentiles are computed: half an hour of scrapes every 15 s."""
_PERCENTILES = (50, 90, 99)


class AgentCalls(Durations):
    """The calls to a guest's agent: their durations, and the time of the agent's last answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        super().__init__()
        self._clock = clock
        self._answered_s: float | None = None
        self._quick: deque[float] = deque(maxlen=_LATEST)

    def took(self, action: str, seconds: float) -> None:
        super().took(action, seconds)
        if action in QUICK:
            self._quick.append(seconds)

    def answered(self) -> None:
        """Notes that the agent has answered a call now, even with an error."""
        self._answered_s = self._clock()

    def age_s(self) -> float | None:
        """Seconds since the agent's last answer; None before the first."""
        return None if self._answered_s is None else self._clock() - self._answered_s

    def percentiles(self) -> Mapping[int, float]:
        """Seconds that the latest quick calls took, failed ones included, by percentile; empty without any."""
        ordered = sorted(self._quick)
        return {each: ordered[-(-each * len(ordered) // 100) - 1] for each in _PERCENTILES} if ordered else {}


MONITOR_SOCKET = "shim-monitor.sock"
"""The socket's name in a sandbox's state directory, where Kata's programs look for it."""
MAX_MONITOR_BODY_BYTES = 2 << 20
"""The largest body of a request: a policy or iptables rules, which must fit into one ttrpc message."""
FRESH_S = 30.0
"""Seconds after an answer within which the agent counts as healthy."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/health`."""

    agent_age_s: float | None
    """Seconds since the agent's last answer; None before the first."""
    problem: str
    """Why the agent did not answer this time; empty if it did, or if it was not asked."""


class SizeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A VM's number of vCPUs, or its MiB of memory."""

    requested: float
    """The exact sum of the configuration's base and the pod's request."""
    booted: int
    current: int
    limit: int
    """The largest size that the VM can grow to."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    vmm_pid: int
    """0 if no VMM runs on this host."""
    virtiofsd_pid: int
    """0 without one."""
    vcpus: SizeFigures
    memory_mib: SizeFigures
    is_cloned: bool
    """The guest continued from a template instead of booting."""
    containers: int
    ledger: Mapping[str, int]
    """The number of entries by kind."""
    spans: tuple[Span, ...]
    streams: Mapping[tuple[str, str], int]
    """Bytes transferred, by container and stream."""
    oom_kills: Mapping[str, int]
    """The number of OOM kills, by container."""
    missed_checks: int
    """The number of health checks that the agent failed."""
