"""Histograms of the durations of calls, with the buckets of Kata's metrics."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
