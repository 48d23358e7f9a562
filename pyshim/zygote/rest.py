"""A forked shim that nobody asks anything gives back the memory that it only made its own by looking at it."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pyshim.host.memory.baseline import Baseline, NotAlone

log = logging.getLogger("pyshim.zygote")

QUIET_S = 5.0
"""Since the last call. Kubelet asks for statistics each ten seconds."""
AT_MOST_EVERY_S = 60.0
"""What a call writes to again is little, and some 20 ms of CPU time are not nothing on a node of many pods."""
_THREADS_END_WITHIN_S = 0.2
_ASLEEP_AFTER_S = 0.1
_TRIES = 3
"""Threads that wait for work have mostly ended within `_THREADS_END_WITHIN_S`; one that works may do so for ever."""


class Rest:
    """Wakes the process only after it was awake anyway: no timer is left once a rest has followed the last call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, baseline: Baseline, *, quiet_s: float = QUIET_S) -> None:
        self._loop = loop
        self._baseline = baseline
        self._quiet_s = quiet_s
        self._executor = self._new_executor()
        self._timer: asyncio.TimerHandle | None = None
        self._last_call_s = loop.time()
        self._not_before_s = 0.0
        self._wanted = False
        """There was a call since the last rest began."""
        self._tries_left = 0
        self._is_closed = False

    def called(self) -> None:
        """A call has been answered: there is a rest once it has been quiet since."""
        self._last_call_s = self._loop.time()
        self._wanted = True
        self._tries_left = _TRIES
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_at(self._due_s(), self._look)

    def close(self) -> None:
        """There are no more rests, whatever is called."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _due_s(self) -> float:
        return max(self._last_call_s + self._quiet_s, self._not_before_s)

    def _look(self) -> None:
        due_s = self._due_s()
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self._wanted = False
        # Threads that wait for work end; the next work has new ones.
        idle, self._executor = self._executor, self._new_executor()
        idle.shutdown(wait=False)
        self._timer = self._loop.call_later(_THREADS_END_WITHIN_S, self._rest)

    def _rest(self) -> None:
        try:
            given_back = self._baseline.give_back()
        except (NotAlone, OSError) as error:
            # Not alone: something is under way, which a call began or will follow; or it has only just ended.
            log.debug("no rest", extra={"error": str(error)})
            self._tries_left -= 1
            if not isinstance(error, NotAlone):
                self._not_before_s = self._loop.time() + AT_MOST_EVERY_S
            elif self._tries_left > 0:
                self._wanted = True
                self._not_before_s = self._loop.time() + self._quiet_s
            self._go_on()
        else:
            log.debug("rested", extra={"given_back_bytes": given_back})
            self._not_before_s = self._loop.time() + AT_MOST_EVERY_S
            self._timer = self._loop.call_later(_ASLEEP_AFTER_S, self._turn_away)

    def _turn_away(self) -> None:
        with suppress(NotAlone, OSError):
            self._baseline.turn_away()
        self._go_on()

    def _go_on(self) -> None:
        self._timer = self._loop.call_at(self._due_s(), self._look) if self._wanted else None

    def _new_executor(self) -> ThreadPoolExecutor:
        executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
        self._loop.set_default_executor(executor)
        return executor
