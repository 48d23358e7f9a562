"""Changes of the host made in threads, which nobody can cancel: whoever gives one up waits until it has ended."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import ParamSpec

log = logging.getLogger("pyshim.host")

P = ParamSpec("P")

LAST_WAIT_S = 5.0
"""For a change whose caller has given up: after that the kernel is not going to answer (a dead disk or server)."""


async def to_the_end(change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """`change` was made in a thread, and is not still being made when this raises CancelledError.

    A thread cannot be cancelled; were it left behind, the caller's undo would run first and the change stay for ever.
    Only one the kernel does not answer for LAST_WAIT_S after the cancellation is left behind.
    """
    await ended(asyncio.ensure_future(asyncio.to_thread(change, *args, **kwargs)))


async def ended(work: "asyncio.Future[None]") -> None:
    """`work`, which runs in a thread, has ended; or its caller was cancelled and the kernel has not answered since."""
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
