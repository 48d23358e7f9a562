"""Bounded waiting. The one place of the integration tests that polls; every wait has a deadline and names what it
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    look: Callable[[], T], *, what: str | Callable[[], str], within_s: float = 30.0, every_s: float = 0.05
) -> T:
    """The first true value of `look()`. Raises AssertionError naming `what` when there is none within `within_s`
    seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what() if callable(what) else what}")
        time.sleep(every_s)
