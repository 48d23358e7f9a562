"""Signals to a container's processes, and what the shim does when the guest does not carry out a KILL.

A guest that hangs or lies must not keep its pod alive:

- A KILL of the sandbox's owner ends the VM, whatever the guest does.
- A KILL of another container ends the VM if the agent answers neither it nor a health check. If the agent has taken the
  KILL, the exit is reported when it comes, as with runc: its process may be busy in the guest's kernel. While it does
  not come, the agent's health is checked every EXIT_S.
- An exec that does not end after a KILL is reported as ended. Nothing else ends with it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from pyshim.concurrency.tasks import TaskOwner, cancel_all
from pyshim.model.errors import DeadlineExceeded, ShimError
from pyshim.model.oci import Caller
from pyshim.model.task import Status
from pyshim.pod.container import Container
from pyshim.pod.health import TIMEOUT_S as HEALTH_TIMEOUT_S
from pyshim.pod.life import SandboxLife
from pyshim.pod.process import SIGKILL, Process

log = logging.getLogger(__name__)

OWNER_EXIT_S = 10.0
"""Seconds from the KILL of the sandbox's owner to its exit; the VM would end with it anyway."""
EXIT_S = 30.0
"""Seconds from the KILL of any other process to the first look at a guest that has not ended it: a busy guest writes
back what the process had open."""
REPLY_S = 10.0
"""Seconds for the agent's reply to a signal, before its health is checked."""
CHECK_S = 10.0
"""Seconds for the reply to that check. If it comes, the signal has the usual deadline of a call."""


class GuestHangs(DeadlineExceeded):
    """The agent answers neither a signal nor a health check."""


async def signal_init(
    container: Container, life: SandboxLife, signal: int, *, all_processes: bool, owner: bool, tasks: TaskOwner
) -> None:
    """The init was signalled. After a KILL of the `owner` its exit is final within OWNER_EXIT_S.

    Raises what `Process.kill` raises, and GuestHangs. Instead of GuestHangs, a KILL ends the container and the sandbox,
    and for CRI-O another signal is logged.
    """
    kills = signal == SIGKILL and container.init.exit is None
    if kills and not container.has_kill_deadline:
        container.has_kill_deadline = True
        tasks.supervise(f"kill/{container.id}", _end_init_in_time(container, life, owner=owner))
    try:
        await _signal(container.init, life, signal, all_processes=all_processes)
    except GuestHangs as exc:
        if not kills and container.caller is not Caller.CRI_O:
            raise
        if not kills:
            # When the first signal of a stop fails, CRI-O never sends the KILL that would end the VM.
            log.warning("signal not delivered", extra={"container": container.id, "error": str(exc)})
            return
        container.report_killed()
        if not owner:
            life.lost("kill", str(exc))


async def _signal(process: Process, life: SandboxLife, signal: int, *, all_processes: bool) -> None:
    """The agent has taken the signal, or the process has ended. Raises GuestHangs if the agent answers nothing."""
    async with _running(process.kill(signal, all_processes=all_processes)) as sent, _running(process.wait()) as ended:
        await _first(sent, ended, within_s=REPLY_S)
        if _unanswered(sent) and not ended.done():
            async with _running(life.running.agent.check(CHECK_S)) as checked:
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
    """No reply has come yet, or none within the call's deadline."""
    return not call.done() or isinstance(call.exception(), DeadlineExceeded)


async def signal_exec(
    container: Container, process: Process, signal: int, *, all_processes: bool, tasks: TaskOwner
) -> None:
    """The exec was signalled. After a KILL its exit is final within EXIT_S, whatever the guest does."""
    kills = signal == SIGKILL and process.status is Status.RUNNING
    await process.kill(signal, all_processes=all_processes)
    if kills and process.exit is None:
        tasks.supervise(f"kill/{process.label}", _end_exec_in_time(container, process))


async def _end_init_in_time(container: Container, life: SandboxLife, *, owner: bool) -> None:
    """The init has ended, or the sandbox does: at once with its owner, else when the guest fails a health check."""
    if owner:
        if not await _ends(container.init, OWNER_EXIT_S):
            facts = {"container": container.id, "waited_s": OWNER_EXIT_S}
            log.warning("killed container ended without its guest", extra=facts)
            container.report_killed()
        return
    waited_s = 0.0
    while not await _ends(container.init, EXIT_S):
        waited_s += EXIT_S
        level = logging.WARNING if waited_s == EXIT_S else logging.DEBUG
        log.log(level, "killed container has not ended", extra={"container": container.id, "waited_s": waited_s})
        try:
            await life.running.agent.check(HEALTH_TIMEOUT_S)
        except DeadlineExceeded as exc:
            container.report_killed()
            life.lost("kill", f"the guest has not ended '{container.id}' {waited_s:g} s after a KILL: {exc}")
        except ShimError as exc:  # whatever ends the sandbox ends the container
            log.debug("check after kill", extra={"container": container.id, "error": str(exc)})


async def _end_exec_in_time(container: Container, process: Process) -> None:
    if not await _ends(process, EXIT_S):
        log.warning("killed exec ended without its guest", extra={"of": process.label, "waited_s": EXIT_S})
        container.report_exec_killed(process)


async def _ends(process: Process, limit_s: float) -> bool:
    """True if the exit is final within `limit_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await process.wait()
            return True
    return False


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """`work` runs as a task; it has ended, cancelled if necessary, when the block is left."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await cancel_all(task)


async def _first(*tasks: asyncio.Future[Any], within_s: float | None = None) -> None:
    """One of `tasks` is done, or `within_s` has passed."""
    await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
