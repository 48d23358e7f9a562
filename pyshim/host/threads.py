"""Work in threads: reads and changes that may block, and work in other namespaces, roots or directories.

Threads cannot be cancelled: a cancelled caller waits until a change ends (`thread_to_the_end`), or leaves it behind.

At the limit of processes of the pod's cgroup no thread can be started, and what was made must still be undone. Then
reads, changes of the pool and undos are done in the caller's thread, and work that needs a thread of its own, for a
namespace, is given to the one that is kept in reserve.
"""

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from pyshim.model.errors import ResourceExhausted

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LAST_WAIT_S = 5.0
"""Seconds to wait for a change whose caller was cancelled: beyond that, a dead disk or server will not answer."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns or raises as `work` does, from a thread of the loop's pool; from this one if the pool cannot grow."""
    loop = asyncio.get_running_loop()
    begun = threading.Lock()
    call = partial(contextvars.copy_context().run, work, *args, **kwargs)

    def once() -> T | None:
        # The pool may have queued the work although it could not start a thread for it.
        return call() if begun.acquire(blocking=False) else None

    try:
        future = loop.run_in_executor(None, once)
    except RuntimeError:
        if begun.acquire(blocking=False):
            log.warning("no thread could be started, so the loop waits", extra={"work": _name(work)})
            return call()
        raise ResourceExhausted(_no_thread(_name(work))) from None
    return await future  # type: ignore[return-value]  # this is its only call


async def thread_to_the_end(change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """`change` was made in a thread, and is not still being made when this raises CancelledError.

    The caller's undo must not run before the change, or the change would stay. The thread is left behind only when the
    kernel has not answered LAST_WAIT_S after the cancellation.
    """
    await ended(asyncio.ensure_future(in_thread(change, *args, **kwargs)))


async def ended(work: "asyncio.Future[None]") -> None:
    """`work`, which runs in a thread, has ended; or the caller was cancelled and LAST_WAIT_S have passed."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WAIT_S
        while not work.done() and loop.time() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work], timeout=until - loop.time())
        if work.done() and (error := work.exception()):
            log.debug("failed while being cancelled", extra={"error": str(error)})
        raise


async def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns or raises as `work` does. Raises ResourceExhausted if no thread can be started.

    The loop's executor has few threads, shared by all streams and mounts of the pod, and the interpreter waits for them
    before it ends. This thread is a daemon; when the caller is cancelled it goes on, and its result is dropped.
    """
    _, result = daemon_thread(f"own/{_name(work)}", partial(work, *args, **kwargs))
    return await asyncio.wrap_future(result)


def daemon_thread(name: str, work: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """A daemon thread in which `work` runs, and the result or exception of `work`. Raises ResourceExhausted."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on a cancelled caller leaves it alone

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceExhausted(_no_thread(name)) from error
    return thread, result


def in_short_thread(work: Callable[[], T]) -> T:
    """The result of `work`, or its exception, from a thread that has ended. Blocking. Raises ResourceExhausted."""
    try:
        thread, result = daemon_thread(f"short/{_name(work)}", work)
    except ResourceExhausted:
        return _reserve.carry_out(work)
    thread.join()
    return result.result()


class _Reserve:
    """One thread that waits for work. It ends with its work, whose namespaces it may have, and has a successor then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def renew(self) -> None:
        """A new thread waits, with the capabilities of the calling one. Raises ResourceExhausted."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(lambda: None)
                thread.join()
            self._start()

    def carry_out(self, work: Callable[[], T]) -> T:
        """As `in_short_thread`. Blocks while the thread has other work. Raises ResourceExhausted without a thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                raise ResourceExhausted(_no_thread(_name(work)))
            result: Future[T] = Future()

            def run() -> None:
                try:
                    result.set_result(work())
                except BaseException as error:
                    result.set_exception(error)

            self._work.put(run)
            thread.join()
            with contextlib.suppress(ResourceExhausted):
                self._start()
        return result.result()

    def _start(self) -> None:
        work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._work = work
        self._thread, _ = daemon_thread("reserve", lambda: work.get()())


_reserve = _Reserve()


def keep_one_in_reserve() -> None:
    """A thread waits for work that cannot have another one; it replaces an earlier one. Raises ResourceExhausted."""
    _reserve.renew()


def _name(work: Callable[..., object]) -> str:
    return getattr(work, "__name__", type(work).__name__)


def _no_thread(name: str) -> str:
    return f"start thread {name!r}: EAGAIN (hint: is the limit of processes, pids.max or LimitNPROC, reached?)"
