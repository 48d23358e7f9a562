"""One thread, one epoll set, native coroutines without asyncio.

A coroutine awaits `Promise`s only. `Loop.spawn` runs it as a `Task` from the next turn on; a task steps only from the
loop, never from inside another task's step, so code between awaits is atomic.
"""

from __future__ import annotations

import select
import time
from heapq import heappop, heappush

from guest.agent import log
from guest.agent.errors import DeadlineExceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any


class Cancelled(BaseException):
    """Thrown into a task's coroutine by `Task.cancel`."""


class Promise:
    """A value or an error that arrives once. Any number of tasks may await it, before or after it arrives."""

    __slots__ = ("_loop", "_waiters", "done", "error", "value")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiters: list[Callable[[], None]] = []
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def resolve(self, value: Any = None) -> None:
        """The promise holds `value`; a second resolve or fail is ignored."""
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        self._settle(None, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._loop.soon(waiter)

    def when_done(self, callback: Callable[[], None]) -> None:
        """`callback` runs from the loop once the promise is settled."""
        if self.done:
            self._loop.soon(callback)
        else:
            self._waiters.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self._waiters:
            self._waiters.remove(callback)

    def __await__(self) -> Generator[Promise, None, Any]:
        if not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.value


class Task:
    """A running coroutine. `result` settles with its return value or exception (`Cancelled` included)."""

    __slots__ = ("_cancel_asked", "_coro", "_loop", "_waiting", "_wake", "name", "result")

    def __init__(self, loop: Loop, name: str, coro: Coroutine[Promise, None, Any]) -> None:
        self._loop = loop
        self._coro = coro
        self._waiting: Promise | None = None
        self._cancel_asked = False
        self._wake = self._step  # one bound method, so that `forget` finds it
        self.name = name
        self.result = Promise(loop)

    def cancel(self) -> None:
        """`Cancelled` is raised at the coroutine's await on the loop's next turn; a finished task stays so."""
        if self.result.done or self._cancel_asked:
            return
        self._cancel_asked = True
        if self._waiting is not None:
            self._waiting.forget(self._wake)
            self._waiting = None
            self._loop.soon(self._wake)

    def _step(self) -> None:
        if self.result.done:
            return
        self._waiting = None
        try:
            if self._cancel_asked:
                self._cancel_asked = False
                waiting = self._coro.throw(Cancelled())
            else:
                waiting = self._coro.send(None)
        except StopIteration as stop:
            self.result.resolve(stop.value)
        except BaseException as error:  # the task supervisor: whoever awaits `result` sees it
            if not isinstance(error, (Exception, Cancelled)):
                raise
            self.result.fail(error)
        else:
            self._waiting = waiting
            waiting.when_done(self._wake)


class Timer:
    """A pending `call_later`; `cancel` makes it never fire."""

    __slots__ = ("callback", "due", "serial")

    def __init__(self, due: float, serial: int, callback: Callable[[], None]) -> None:
        self.due = due
        self.serial = serial
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return (self.due, self.serial) < (other.due, other.serial)


class Lock:
    """First come, first served mutual exclusion between tasks: `await lock.acquire()` ... `lock.release()`."""

    __slots__ = ("_held", "_loop", "_queue")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._held = False
        self._queue: list[Promise] = []

    async def acquire(self) -> None:
        if not self._held:
            self._held = True
            return
        turn = Promise(self._loop)
        self._queue.append(turn)
        try:
            await turn
        except Cancelled:
            if turn.done:
                self.release()  # the turn was already given to us: pass it on
            else:
                self._queue.remove(turn)
            raise

    def release(self) -> None:
        if self._queue:
            self._queue.pop(0).resolve()
        else:
            self._held = False


class Loop:
    """See the module text. `on_idle` runs one piece of spare-time work and says if there is more."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._ready: list[Callable[[], None]] = []
        self._timers: list[Timer] = []
        self._serial = 0
        self.on_idle: Callable[[], bool] | None = None

    # -- running ---------------------------------------------------------------------------------------------------

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Serve until `is_over()` after a turn. An exception of a callback is logged and ends that callback only."""
        while not is_over():
            self.turn()

    def turn(self) -> None:
        """One round: file descriptors (blocking when nothing else is due), then due timers, then what is ready.

        What is ready comes last, so that `is_over` is asked before the loop blocks again.
        """
        timeout = 0.0 if self._ready else self._until_next_timer()
        if self.on_idle is None or timeout == 0.0 or not (self._poll(0.0) or self._idle()):
            self._poll(timeout)
        self._fire_timers()
        ready, self._ready = self._ready, []
        for callback in ready:
            self._call(callback)

    def _idle(self) -> bool:
        assert self.on_idle is not None
        try:
            if not self.on_idle():
                self.on_idle = None
        except Exception as error:
            log.error("idle work failed", error=repr(error))
        return True

    def _poll(self, timeout: float) -> bool:
        try:
            events = self._epoll.poll(timeout)
        except InterruptedError:
            return True
        for fd, mask in events:
            watcher = self._watched.get(fd)  # may have been removed by an earlier event of this round
            if watcher is not None:
                self._call(watcher, mask)
        return bool(events)

    def _call(self, callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except Exception as error:
            log.error("callback failed", callback=repr(callback), error=repr(error))

    def _until_next_timer(self) -> float:
        while self._timers and self._timers[0].callback is None:
            heappop(self._timers)
        return max(0.0, self._timers[0].due - time.monotonic()) if self._timers else -1.0

    def _fire_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            callback = heappop(self._timers).callback
            if callback is not None:
                self._call(callback)

    # -- building blocks -------------------------------------------------------------------------------------------

    def soon(self, callback: Callable[[], None]) -> None:
        self._ready.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        self._serial += 1
        timer = Timer(time.monotonic() + delay_s, self._serial, callback)
        heappush(self._timers, timer)
        return timer

    def spawn(self, name: str, coro: Coroutine[Promise, None, Any]) -> Task:
        """The coroutine runs as a task from the loop's next turn on."""
        task = Task(self, name, coro)
        self.soon(task._wake)
        return task

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """`callback(events)` runs whenever epoll reports `fd`; watching a watched fd replaces mask and callback."""
        if fd in self._watched:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Call before closing a watched fd: its number may be another file by the next event."""
        if self._watched.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except OSError:
                pass  # already closed

    # -- awaitables ------------------------------------------------------------------------------------------------

    async def sleep(self, delay_s: float) -> None:
        promise = Promise(self)
        timer = self.call_later(delay_s, promise.resolve)
        try:
            await promise
        finally:
            timer.cancel()

    async def wait_fd(self, fd: int, mask: int) -> None:
        """Returns when epoll reports `fd` for `mask` (or an error or hang-up). One waiter per fd."""
        promise = Promise(self)
        self.watch(fd, mask, lambda _events: promise.resolve())
        try:
            await promise
        finally:
            self.unwatch(fd)

    async def within(self, timeout_s: float, coro: Coroutine[Promise, None, Any], what: str) -> Any:
        """The coroutine's result. After `timeout_s` it is cancelled and DeadlineExceeded names `what`."""
        task = self.spawn(what, coro)
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            task.cancel()

        timer = self.call_later(timeout_s, expire)
        try:
            return await task.result
        except Cancelled:
            if expired and task.result.done:
                raise DeadlineExceeded(f"{what}: timed out after {timeout_s:g} s") from None
            task.cancel()
            raise
        finally:
            timer.cancel()
