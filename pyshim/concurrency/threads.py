"""Changes of the host made in threads. Threads cannot be cancelled: a cancelled caller waits until the change ends."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import ParamSpec

log = logging.getLogger(__name__)

P = ParamSpec("P")

LAST_WAIT_S = 5.0
"""Seconds to wait for a change whose caller was cancelled: beyond that, a dead disk or server will not answer."""


async def thread_to_the_end(change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """`change` was made in a thread, and is not still being made when this raises CancelledError.

    The caller's undo must not run before the change, or the change would stay. The thread is left behind only when the
    kernel has not answered LAST_WAIT_S after the cancellation.
    """
    await ended(asyncio.ensure_future(asyncio.to_thread(change, *args, **kwargs)))


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
