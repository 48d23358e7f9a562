"""SIGUSR1: what this shim is doing right now, written to its log."""

import asyncio
import logging
import os
import signal
import types
from collections.abc import Callable, Iterable

log = logging.getLogger("pyshim.debug")


def dump_on_signal(loop: asyncio.AbstractEventLoop, open_requests: Callable[[], Iterable[str]]) -> None:
    """From now on SIGUSR1 writes `dump`'s lines to the log."""
    loop.add_signal_handler(signal.SIGUSR1, lambda: write_dump(loop, open_requests()))


def write_dump(loop: asyncio.AbstractEventLoop, open_requests: Iterable[str]) -> None:
    """One log line per task of `loop` (with where it waits), per open request and per child, and the fd count."""
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        log.info("dump task", extra={"task": task.get_name(), "waits_at": " > ".join(waiting_at(task))})
    for request in open_requests:
        log.info("dump request", extra={"request": request})
    for pid, command in children():
        log.info("dump child", extra={"pid": pid, "command": command})
    log.info("dump end", extra={"pid": os.getpid(), "fds": len(os.listdir("/proc/self/fd"))})


def waiting_at(task: "asyncio.Task[object]") -> list[str]:
    """The await chain of a suspended task, outermost first; asyncio's own get_stack stops at the first coroutine."""
    places = []
    awaited: object = task.get_coro()
    while awaited is not None:
        frame: types.FrameType | None
        if isinstance(awaited, types.CoroutineType):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif isinstance(awaited, types.AsyncGeneratorType):
            frame, inner = awaited.ag_frame, awaited.ag_await
        elif isinstance(awaited, types.GeneratorType):
            frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            places.append(type(awaited).__name__)
            break
        if frame is not None:
            code = frame.f_code
            places.append(f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        awaited = inner
    return places


def children() -> list[tuple[int, str]]:
    """Pid and command name of every child process."""
    found = []
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [int(word) for word in file.read().split()]
    for pid in pids:
        try:
            with open(f"/proc/{pid}/comm") as file:
                found.append((pid, file.read().strip()))
        except OSError:
            found.append((pid, "gone"))
    return found
