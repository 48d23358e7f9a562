"""Blocking calls that may never return: each in a thread of its own, which holds up neither other work nor the exit."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns or raises as `work` does.

    The loop's executor has few threads, shared by all streams and mounts of the pod, and the interpreter waits for them
    before it ends. This thread is a daemon; when the caller is cancelled it goes on, and its result is dropped.
    """
    _, result = own_thread(f"own/{work.__name__}", partial(work, *args, **kwargs))
    return await result


def own_thread(name: str, work: Callable[[], T]) -> tuple[threading.Thread, asyncio.Future[T]]:
    """A daemon thread in which `work` runs, and the result or exception of `work`."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # None only when T has it

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, value, failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, result
