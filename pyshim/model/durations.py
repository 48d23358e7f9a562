"""Durations of calls, counted in the buckets of Kata's histograms."""

from bisect import bisect_left
from collections.abc import Mapping
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
