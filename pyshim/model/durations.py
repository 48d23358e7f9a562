"""Durations of calls, counted in the buckets of Kata's histograms."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

BOUNDS_MS = tuple(2**exponent for exponent in range(10))
"""Upper bounds in milliseconds: 10 from 1 on, each twice the one before, as Kata's."""


class Duration(NamedTuple):
    counts: tuple[int, ...]
    """Calls that took at most the bound of this place, and more than the one before; the last place has no bound."""
    sum_ms: float


class Durations:
    """Counts by action. The actions are names of calls, of which there are a few dozen."""

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
        """The counts so far."""
        return {action: Duration(tuple(counts), self._sums_ms[action]) for action, counts in self._counts.items()}


QUICK = frozenset({"grpc.CheckRequest", "grpc.GetMetricsRequest"})
"""Calls that a guest answers at once, independent of its containers."""
_LATEST = 128
"""Quick calls that the percentiles are of: half an hour of scrapes, one each 15 s."""
_PERCENTILES = (50, 90, 99)


class AgentCalls(Durations):
    """The calls to a guest's agent: when it last answered, and how slow it is."""

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
        """The agent has answered a call just now, if with an error."""
        self._answered_s = self._clock()

    def age_s(self) -> float | None:
        """Seconds since its last answer; None before the first."""
        return None if self._answered_s is None else self._clock() - self._answered_s

    def percentiles(self) -> Mapping[int, float]:
        """Seconds that the latest quick calls took, those without an answer among them; empty before the first."""
        ordered = sorted(self._quick)
        return {each: ordered[-(-each * len(ordered) // 100) - 1] for each in _PERCENTILES} if ordered else {}
