"""A task as an operator sees it from outside: processes, events."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework.ctr import Ctr
from .framework.events import task_events, until_watching
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]


def test_ps_lists_an_added_process_while_it_runs(ctr: Ctr, shared: str, scratch: Path) -> None:
    before = len(ctr("task", "ps", shared).rows())
    with ctr.background(
        scratch, "task", "exec", "--exec-id", "listed", shared, "sh", "-c", "echo up; sleep 1000"
    ) as added:
        added.wait_for("up")
        assert len(ctr("task", "ps", shared).rows()) > before
        ctr("task", "kill", "--exec-id", "listed", "--signal", "KILL", shared)
        added.wait()

    eventually(lambda: len(ctr("task", "ps", shared).rows()) == before, what="the ended process is off the list")


def test_events_come_in_the_order_of_the_tasks_life(ctr: Ctr, name: str, scratch: Path) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr.start(name)
        ctr("task", "exec", "--exec-id", "added", name, "sh", "-c", "exit 3", check=False)
        ctr("task", "pause", name)
        ctr("task", "resume", name)
        ctr("task", "kill", "--signal", "KILL", name)
        ctr.wait_for_state(name, "STOPPED")
        ctr("task", "rm", name, check=False)
        watching.wait_for("/tasks/delete")
        events = task_events(watching.out(), name)

    assert [topic for topic, _ in events] == [
        "/tasks/create",
        "/tasks/start",
        "/tasks/exec-added",
        "/tasks/exec-started",
        "/tasks/exit",
        "/tasks/paused",
        "/tasks/resumed",
        "/tasks/exit",
        "/tasks/delete",
    ]
    exec_exit, init_exit = (body for topic, body in events if topic == "/tasks/exit")
    assert (exec_exit["id"], exec_exit.get("exit_status")) == ("added", 3)
    assert (init_exit["id"], init_exit.get("exit_status")) == (name, 137)


@pytest.mark.parametrize("code", [0, 5])
def test_start_is_published_before_exit_even_for_a_process_that_ends_at_once(
    ctr: Ctr, name: str, scratch: Path, code: int
) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr.run(name, "sh", "-c", f"exit {code}", check=False)
        watching.wait_for("/tasks/delete")
        events = task_events(watching.out(), name)

    assert [topic for topic, _ in events] == ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"]
