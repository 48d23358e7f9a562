"""Work that goes on when its caller has stopped waiting. The clock is the test's: nothing here waits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.cleanup.background import LONG_WAIT_S, Outcome, listen

PROJECT = Path(__file__).parents[3]


class Clock:
    """It stands still until the test turns it; a look at it may turn it further."""

    def __init__(self, *, each_look_s: float = 0.0) -> None:
        self.now = 1000.0
        self._each_look_s = each_look_s

    def __call__(self) -> float:
        self.now += self._each_look_s
        return self.now


class Pipe:
    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()

    def say(self, text: str) -> None:
        os.write(self.theirs, text.encode())

    def end(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
        self.theirs = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.end()
    os.close(pipe.ours)


def test_everything_is_heard_of_work_that_ends_in_time(pipe: Pipe) -> None:
    outcome, clock = Outcome(), Clock()
    pipe.say("error first: went wrong\nnote by the way\nerror second\n")
    pipe.end()

    assert listen(pipe.ours, outcome, clock.now + 1, clock=clock)

    assert (outcome.errors, outcome.notes) == (["first: went wrong", "second"], ["by the way"])


@pytest.mark.parametrize("left_s", [0.0, -3.0], ids=["now", "over"])
def test_without_time_left_what_was_told_is_heard_and_nothing_is_waited_for(pipe: Pipe, left_s: float) -> None:
    outcome, clock = Outcome(), Clock()
    pipe.say("note by the way\n")

    assert not listen(pipe.ours, outcome, clock.now + left_s, clock=clock)

    assert outcome.notes == ["by the way"]


def test_work_that_takes_long_is_waited_for_a_moment_only(pipe: Pipe) -> None:
    outcome, clock = Outcome(), Clock(each_look_s=LONG_WAIT_S)
    pipe.say("long it waits for its end\n")

    assert not listen(pipe.ours, outcome, clock.now + 3600, clock=clock)

    assert outcome.waits_for == "it waits for its end"
    assert clock.now - 1000.0 < 10 * LONG_WAIT_S


def test_a_line_that_was_cut_off_is_not_heard(pipe: Pipe) -> None:
    outcome, clock = Outcome(), Clock()
    pipe.say("note whole\nerror it was")
    pipe.end()

    assert listen(pipe.ours, outcome, clock.now, clock=clock)

    assert (outcome.notes, outcome.errors) == (["whole"], [])


PROGRAM = """
import os, sys, time
sys.path.insert(0, {project!r})
from pyshim.cleanup.background import Report, run_in_background
def work(report):
{work}
if {has_room}:
    pass
else:
    def refused():
        raise BlockingIOError(11, "no room")
    os.fork = refused
outcome = run_in_background(work, "work", time.monotonic() + 60)
print(outcome.pid, outcome.notes, outcome.errors, sep="|")
"""


def carried_out(*work: str, has_room: bool = True) -> str:
    """The reports that a process of one thread got of that work."""
    body = "\n".join(f"    {line}" for line in work)
    program = PROGRAM.format(project=str(PROJECT), work=body, has_room=has_room)
    return subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("work", "heard"),
    [
        pytest.param(["report(Report.NOTE, 'why')"], "0|['why']|[]", id="notes"),
        pytest.param(["report(Report.ERROR, 'two\\nlines')"], "0|[]|['two lines']", id="fails in part"),
        pytest.param(["raise ValueError('why')"], "0|[]|['work: why']", id="fails"),
        pytest.param(["raise MemoryError"], "0|[]|['work: MemoryError']", id="fails without a text"),
        pytest.param(["os._exit(3)"], "0|[]|['work: the process that was to do it ended with status 3']", id="dies"),
        pytest.param(["print('lost')"], "0|[]|[]", id="prints"),
    ],
)
def test_how_the_work_ends_is_heard(work: list[str], heard: str) -> None:
    assert carried_out(*work) == heard


def test_where_there_is_no_room_for_another_process_this_one_does_the_work() -> None:
    assert carried_out("report(Report.NOTE, 'done')", has_room=False) == "0|['done']|[]"
