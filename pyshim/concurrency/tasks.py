"""Owned asyncio tasks. The loop keeps only weak references to tasks, so each has an owner that holds it, and a name."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from pyshim.model.errors import Cancelled, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

END_REASON_S = 0.5
"""Seconds from a first sign to the end of a VM, whose reason explains more."""


class TaskOwner:
    """Keeps tasks alive until they end, reports the ones that fail, and ends them all on `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """`work` runs as a task called `name`. The caller awaits it, or its failure is dropped."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def supervise(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Like `spawn` for background work that no caller awaits: its failure is logged with the traceback."""
        task = self.spawn(name, work)
        task.add_done_callback(_report)
        return task

    async def close(self) -> None:
        """Every task has ended, cancelled where it still ran. Must not be called from one of them."""
        await cancel_all(*(task for task in self._tasks if task is not asyncio.current_task()))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it retrieved: the awaiting caller reports it


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Every one of `tasks` has ended, cancelled where it still ran; their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Waits for its end even if the caller is cancelled, once or more.

    The cancellation is raised after that. The work must have a limit of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """All of `work` has ended. When one fails, the others are cancelled; once they have ended, its error is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    under_way = set(tasks)
    try:
        while under_way and not any(task.done() and (task.cancelled() or task.exception()) for task in tasks):
            _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if under_way:
            await to_the_end(cancel_all(*under_way))
    # All are asked: asyncio reports an error that nobody has asked for.
    errors = [task.exception() for task in tasks if not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    for task in tasks:
        task.result()


async def while_alive(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, str], *, action: str) -> T:
    """The result of `work`, which needs a VM or a process. As soon as that ends, which `end` returns the reason of,
    Unavailable is raised with the reason.
    """
    wanted, ended = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait([wanted, ended], return_when=asyncio.FIRST_COMPLETED)
        if wanted.done() and wanted.exception() is None:
            return wanted.result()
        if not ended.done():  # a failed call is often the first sign of the end
            await asyncio.wait([ended], timeout=END_REASON_S)
        if ended.done():
            cause = wanted.exception() if wanted.done() else None
            raise Unavailable(f"{action}: {ended.result()}") from cause
        return wanted.result()
    finally:
        await cancel_all(wanted, ended)


async def joined(task: asyncio.Task[T], action: str) -> T:
    """The result of `task`. A cancelled caller does not end the task. Raises Cancelled when the task was cancelled."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if task.cancelled() and (caller is None or not caller.cancelling()):
            raise Cancelled(f"{action}: ended before it was done") from None
        raise


def succeeded(task: asyncio.Task[Any]) -> bool:
    """`task` has returned: it is done, was not cancelled and did not raise."""
    return task.done() and not task.cancelled() and task.exception() is None


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task failed", extra={"task": task.get_name()}, exc_info=error)
