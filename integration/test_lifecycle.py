"""A task in the background: detach, attach, kill, delete, pause, resume, and what each says when it is not its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework.ctr import Ctr
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually

_TALKS = "trap 'echo got TERM; exit 21' TERM; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done"


@pytest.fixture
def background(ctr: Ctr, name: str) -> str:
    """A detached container that does nothing until it is killed."""
    ctr.start(name)
    return name


def test_detached_task_runs_until_killed_and_then_goes_without_a_trace(ctr: Ctr, background: str) -> None:
    assert ctr.state_of(background) == "RUNNING"

    ctr("task", "kill", "--signal", "KILL", background)
    ctr.wait_for_state(background, "STOPPED")
    removed = ctr("task", "rm", background)

    assert "exit code 137" in removed.err
    assert ctr.state_of(background) is None
    ctr("container", "rm", background)


def test_attach_shows_the_output_and_ends_with_the_task(ctr: Ctr, name: str, scratch: Path) -> None:
    ctr.start(name, command=("sh", "-c", _TALKS))

    with ctr.background(scratch, "task", "attach", name) as attached:
        attached.wait_for("tick")
        ctr("task", "kill", name)
        attached.wait_for("got TERM")

        assert attached.wait().code == 21


def test_created_task_starts_only_when_told(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    ctr("container", "create", "--runtime", runtime.name, IMAGE, name, "cat", "/layer-marker", "/missing")

    with ctr.background(scratch, "task", "start", name) as started:
        result = started.wait()

    assert (result.code, result.out) == (1, "upper\n")


def test_kill_with_all_ends_every_process(ctr: Ctr, background: str, scratch: Path) -> None:
    with ctr.background(
        scratch, "task", "exec", "--exec-id", "side", background, "sh", "-c", "echo up; sleep 1000"
    ) as side:
        side.wait_for("up")
        ctr("task", "kill", "--all", "--signal", "KILL", background)

        assert side.wait().code == 137
    ctr.wait_for_state(background, "STOPPED")


def test_paused_task_stands_still_and_goes_on_after_resume(ctr: Ctr, shared: str, scratch: Path) -> None:
    counting = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done"
    with ctr.background(scratch, "task", "exec", "--exec-id", "count", shared, "sh", "-c", counting) as counter:
        counter.wait_for("tick 3\n")
        ctr("task", "pause", shared)
        assert ctr.state_of(shared) == "PAUSED"
        lengths = [-1, -2]

        def stands_still() -> bool:
            lengths.append(len(counter.out()))
            return lengths[-1] == lengths[-2] == lengths[-3]

        eventually(stands_still, what="no more output while paused", every_s=0.5)

        frozen = len(counter.out())
        ctr("task", "resume", shared)
        assert ctr.state_of(shared) == "RUNNING"
        eventually(lambda: len(counter.out()) > frozen, what="output goes on after resume")
        ctr("task", "kill", "--exec-id", "count", "--signal", "KILL", shared)
        assert counter.wait().code == 137
