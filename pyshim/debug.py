"""The shim's present tasks, calls, children and objects, for its log on SIGUSR1 and for its monitor socket."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 1 << 20
"""Characters of one text."""
_TOP_TYPES = 50


def dump_on_signal(loop: asyncio.AbstractEventLoop, open_requests: Callable[[], Iterable[str]]) -> None:
    """From now on SIGUSR1 writes the lines of `stacks` to the log."""

    def write() -> None:
        for line in stacks(open_requests()).splitlines():
            log.info("dump", extra={"line": line})

    loop.add_signal_handler(signal.SIGUSR1, write)


def stacks(open_requests: Iterable[str]) -> str:
    """The running loop's tasks and where they wait, open requests, children, descriptors, and the stack of each thread.

    Cut to `MAX_TEXT_CHARS`.
    """
    tasks = sorted(asyncio.all_tasks(asyncio.get_running_loop()), key=lambda task: task.get_name())
    lines = [f"tasks {len(tasks)}"]
    lines += [f"task {task.get_name()}: {' > '.join(waiting_at(task)) or 'running'}" for task in tasks]
    lines += [f"request {request}" for request in open_requests]
    lines += [f"child {pid} {command}" for pid, command in children()]
    lines.append(f"fds {len(os.listdir('/proc/self/fd'))}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [line.rstrip("\n") for line in traceback.format_stack(frame)]
    return "\n".join(lines)[:MAX_TEXT_CHARS] + "\n"


def objects() -> str:
    """The number of objects of each type, the most frequent ones first. Takes some tens of milliseconds."""
    counted = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    lines = [f"objects {counted.total()}", f"collections {[each['collections'] for each in gc.get_stats()]}"]
    lines += [f"{count:>8} {name}" for name, count in counted.most_common(_TOP_TYPES)]
    return "\n".join(lines)[:MAX_TEXT_CHARS] + "\n"


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
