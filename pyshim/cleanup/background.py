"""Work that a process begins and another carries on: `delete` has seconds, and containerd kills it after five.

The other process is made before anything that may take time, and shares only one pipe with its parent. So the work is
done even when the caller has stopped waiting.
"""

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

Clock = Callable[[], float]
LONG_WAIT_S = 1.0
"""Seconds to wait for work that has reported LONG: an immediate error still reaches the caller."""
_MAX_TEXT_BYTES = 1 << 16


class Report(StrEnum):
    """The kinds of lines that the work writes into the pipe."""

    ERROR = "error"
    NOTE = "note"
    LONG = "long"
    """The reason of a wait of perhaps minutes; unimportant once the work has ended."""


Reporter = Callable[[Report, str], None]
Work = Callable[[Reporter], None]


class Outcome:
    """The reports of the work until it ended or its caller stopped waiting."""

    def __init__(self) -> None:
        self.pid = 0
        """Pid of the process that still works; 0 when it has ended."""
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.waits_for = ""

    def take(self, kind: Report, text: str) -> None:
        match kind:
            case Report.ERROR:
                self.errors.append(text)
            case Report.NOTE:
                self.notes.append(text)
            case Report.LONG:
                self.waits_for = text


def run_in_background(work: Work, action: str, deadline: float, *, clock: Clock = time.monotonic) -> Outcome:
    """The reports of `work`, which goes on in a process of its own when it is not done at `deadline`.

    Later reports are dropped. The caller must be a process of one thread. Where the system has no room for another
    process or a pipe, the work is done in this one, however long it takes.
    """
    outcome = Outcome()
    fds: tuple[int, ...] = ()
    try:
        ours, theirs = fds = os.pipe()
        pid = os.fork()
    except OSError:
        for fd in fds:
            os.close(fd)
        _carry_out(work, action, outcome.take)
        return outcome
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            code = _work_here(work, action, theirs)
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        is_over = listen(ours, outcome, deadline, clock=clock)
    finally:
        os.close(ours)
    if not is_over:
        outcome.pid = pid
        return outcome
    _, status = os.waitpid(pid, 0)
    if status and not outcome.errors:
        how = os.waitstatus_to_exitcode(status)
        outcome.errors.append(f"{action}: the process that was to do it ended with status {how}")
    return outcome


def listen(fd: int, outcome: Outcome, deadline: float, *, clock: Clock = time.monotonic) -> bool:
    """All that was written into the pipe is in `outcome`. False when its writer goes on after `deadline`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    rest = b""
    while poll.poll(max(0.0, deadline - clock()) * 1000):
        piece = os.read(fd, _MAX_TEXT_BYTES)
        if not piece:
            return True
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            kind, _, text = line.decode(errors="replace").partition(" ")
            if kind == Report.LONG and not outcome.waits_for:
                deadline = min(deadline, clock() + LONG_WAIT_S)
            outcome.take(Report(kind), text)
    return False


def _work_here(work: Work, action: str, parent: int) -> int:
    os.setsid()
    os.chdir("/")
    # containerd reads our parent's output until every process has closed it.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def report(kind: Report, text: str) -> None:
        line = f"{kind} {' '.join(text.splitlines())}".encode(errors="replace")[: _MAX_TEXT_BYTES - 1]
        with suppress(OSError):  # the caller has stopped waiting
            os.write(parent, line + b"\n")

    return 0 if _carry_out(work, action, report) else 1


def _carry_out(work: Work, action: str, report: Reporter) -> bool:
    try:
        work(report)
    except Exception as error:
        report(Report.ERROR, f"{action}: {str(error) or type(error).__name__}")
        return False
    return True
