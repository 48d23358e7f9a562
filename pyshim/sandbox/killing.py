"""Signals to a container's init, and what becomes of a KILL that the guest does not carry out.

A guest that hangs must not keep its pod. The KILL of the process the sandbox ends with is the end of the VM, whether
the guest takes part or not. The KILL of any other ends the VM only when the agent answers nothing at all any more: none
of its containers can be reached then, and the kubelet, which kills a pod's containers before its sandbox, could never
remove the pod.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from pyshim.model.errors import DeadlineExceeded
from pyshim.sandbox.container import Container
from pyshim.sandbox.process import Process
from pyshim.sandbox.sandbox import Sandbox
from pyshim.sandbox.tasks import TaskOwner, cancel_all

log = logging.getLogger("pyshim.sandbox.killing")

SIGKILL = 9
END_S = 10.0
"""For the end of the sandbox's own process after its KILL. The VM would end with it, so then it ends without."""
REPLY_S = 10.0
"""For the agent's reply to a signal, before it is asked whether it is there at all."""
CHECK_S = 10.0
"""For its reply to that. A signal that is merely slow has the usual time of a call."""


class GuestHangs(DeadlineExceeded):
    """The agent answers neither a signal nor a health check."""


async def signal_init(
    container: Container, sandbox: Sandbox, signal: int, *, all_processes: bool, owner: bool, tasks: TaskOwner
) -> None:
    """The init was signalled. After a KILL of the sandbox's `owner` it has ended within END_S, whatever the guest does.

    Raises what `Process.kill` raises, GuestHangs among it; for a KILL that is met by the container's end, and the
    sandbox's, instead.
    """
    kills = signal == SIGKILL and container.init.exit is None
    if kills and owner:
        tasks.supervise(f"kill/{container.id}", _insist(container))
    try:
        await _signal(container.init, sandbox, signal, all_processes=all_processes)
    except GuestHangs as exc:
        if not kills:
            raise
        container.end_by_force()
        if not owner:
            sandbox.give_up(str(exc))


async def _signal(process: Process, sandbox: Sandbox, signal: int, *, all_processes: bool) -> None:
    """The agent has taken the signal, or the process has ended meanwhile."""
    async with _running(process.kill(signal, all_processes=all_processes)) as sent, _running(process.wait()) as ended:
        await _first(sent, ended, within_s=REPLY_S)
        if _unanswered(sent) and not ended.done():
            async with _running(sandbox.agent.check(CHECK_S)) as checked:
                await _first(ended, checked, *({sent} if not sent.done() else ()))
                silent = checked.done() and isinstance(checked.exception(), DeadlineExceeded)
                if silent and _unanswered(sent) and not ended.done():
                    raise GuestHangs(
                        f"signal process '{process.label}': the guest hangs: its agent answers neither this nor, "
                        f"within {CHECK_S:g} s, a health check"
                    )
            await _first(sent, ended)
        if not (ended.done() and _unanswered(sent)):
            sent.result()


def _unanswered(call: asyncio.Future[Any]) -> bool:
    return not call.done() or isinstance(call.exception(), DeadlineExceeded)


async def _insist(container: Container) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await container.init.ended()
            return
    log.warning("killed container ended without its guest", extra={"container": container.id, "waited_s": END_S})
    container.end_by_force()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """`work` as a task that has ended when the block is left."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await cancel_all(task)


async def _first(*tasks: asyncio.Future[Any], within_s: float | None = None) -> None:
    """One of them is done, or the time is over."""
    await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
