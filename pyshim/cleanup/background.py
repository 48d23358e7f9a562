"""Work that a process begins and another carries on: `delete` has seconds, and containerd kills it after five.

The other process is made before anything that may take time, and has nothing of its parent but one pipe, so the work is
done whether or not somebody still waits for it.
"""

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

Clock = Callable[[], float]
HEARD_S = 1.0
"""Seconds that work which has said that it takes long is still waited for: an error at once is reported."""
_MAX_TEXT_BYTES = 1 << 16


class Word(StrEnum):
    """What the work can tell."""

    ANSWER = "answer"
    """What the caller wanted to know, which is known before the work is done."""
    ERROR = "error"
    NOTE = "note"
    LONG = "long"
    """What it waits for, perhaps for minutes; of no interest any more once it has ended."""


Tell = Callable[[Word, str], None]
Work = Callable[[Tell], None]


class Outcome:
    """What the work reported until it ended or its caller stopped waiting."""

    def __init__(self) -> None:
        self.pid = 0
        """Of the process that is still at it; 0 when it has ended."""
        self.answer = ""
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.waits_for = ""

    def hear(self, word: Word, text: str) -> None:
        match word:
            case Word.ANSWER:
                self.answer = text
            case Word.ERROR:
                self.errors.append(text)
            case Word.NOTE:
                self.notes.append(text)
            case Word.LONG:
                self.waits_for = text


def apart(work: Work, action: str, deadline: float, *, clock: Clock = time.monotonic) -> Outcome:
    """What `work` told; it goes on in a process of its own when it is not done at `deadline`.

    What it reports later is dropped. The caller must be a process of one thread. Where the system has no room for
    another process the work is done in this one, however long it takes.
    """
    outcome = Outcome()
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        _carry_out(work, action, outcome.hear)
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
        outcome.errors.append(f"{action}: the process that was to do it ended with status {status}")
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
            word, _, text = line.decode(errors="replace").partition(" ")
            if word == Word.LONG and not outcome.waits_for:
                deadline = min(deadline, clock() + HEARD_S)
            outcome.hear(Word(word), text)
    return False


def _work_here(work: Work, action: str, parent: int) -> int:
    os.setsid()
    os.chdir("/")
    # containerd reads our parent's output until every process has closed it.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def tell(word: Word, text: str) -> None:
        line = f"{word} {' '.join(text.splitlines())}".encode(errors="replace")[: _MAX_TEXT_BYTES - 1]
        with suppress(OSError):  # the caller has stopped waiting
            os.write(parent, line + b"\n")

    return 0 if _carry_out(work, action, tell) else 1


def _carry_out(work: Work, action: str, tell: Tell) -> bool:
    try:
        work(tell)
    except Exception as error:
        tell(Word.ERROR, f"{action}: {error}")
        return False
    return True
