"""Bounded waiting. The one place of the integration tests that polls; every wait has a deadline and names what it
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 100.0
"""For what is expected to happen on a machine however busy: how soon is not asked. pytest gives a test 300 s."""


def eventually(
    look: Callable[[], T], *, what: str | Callable[[], str], within_s: float = PATIENCE_S, every_s: float = 0.05
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
