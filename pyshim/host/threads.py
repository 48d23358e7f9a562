"""Threads for one piece of work each: for changes of a thread's namespaces, root or working directory, and for blocking
calls that may never return, which so delay neither other work nor the exit.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

R = TypeVar("R")


def in_short_thread(work: Callable[[], R]) -> R:
    """The result of `work`, or its exception, from a thread that has ended. Blocking."""
    results: list[R] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=f"short/{work.__name__}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns or raises as `work` does.

    The loop's executor has few threads, shared by all streams and mounts of the pod, and the interpreter waits for them
    before it ends. This thread is a daemon; when the caller is cancelled it goes on, and its result is dropped.
    """
    _, result = daemon_thread(f"own/{work.__name__}", partial(work, *args, **kwargs))
    return await asyncio.wrap_future(result)


def daemon_thread(name: str, work: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """A daemon thread in which `work` runs, and the result or exception of `work`."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on a cancelled caller leaves it alone

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, result
