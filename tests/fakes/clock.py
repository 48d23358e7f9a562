"""An event loop whose clock only jumps over idle time: waits of seconds cost nothing and happen in a fixed order.

The clock stands still while anything works: no deadline passes because the machine is busy.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Sleeps no longer than it takes to see that no descriptor is ready, and says how long it would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # nothing is timed: only another thread or process can go on
            return super().select(None)
        self.skipped_s += max(timeout, 0.0)
        return []


class FastForwardLoop(asyncio.SelectorEventLoop):
    """For code whose peers all live in this loop; a peer in a thread or process would find no time to answer."""

    def __init__(self) -> None:
        self._fast_selector = _Selector()
        super().__init__(self._fast_selector)

    def time(self) -> float:
        return self._fast_selector.skipped_s


def run_fast_forward(work: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """The result of `work`, run on a loop of its own.

    `python -X dev` does not switch on asyncio's debug mode here: it notes a stack for every callback, which makes these
    tests take four times as long, and looks for slow callbacks and calls of other threads, which this loop has not.
    """
    with asyncio.Runner(loop_factory=FastForwardLoop, debug=debug) as runner:
        return runner.run(work)
