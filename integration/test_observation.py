"""A task as an operator sees it from outside: metrics, processes, events."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .framework.ctr import Ctr
from .framework.events import task_events, until_watching
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]


def test_metrics_show_memory_cpu_and_process_count(ctr: Ctr, shared: str) -> None:
    metrics = json.loads(ctr("task", "metrics", "--format", "json", shared).out)

    assert _number(metrics, ("memory", "usage")) > 0
    assert _number(metrics, ("cpu", "usage")) > 0
    assert metrics["pids"]["current"] >= 1


def test_cpu_time_grows_with_work(ctr: Ctr, shared: str) -> None:
    def used() -> int:
        return _number(json.loads(ctr("task", "metrics", "--format", "json", shared).out), ("cpu", "usage"))

    before = used()
    ctr("task", "exec", "--exec-id", "work", shared, "sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")

    assert used() > before


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


def test_events_come_in_the_order_of_the_tasks_life(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sleep", "100000")
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


def test_init_exit_is_published_after_the_exits_of_all_execs(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sleep", "100000")
        for number in range(3):
            ctr("task", "exec", "--detach", "--exec-id", f"side{number}", name, "sleep", "100000")
        ctr("task", "kill", "--signal", "KILL", name)
        ctr.wait_for_state(name, "STOPPED")
        ctr("task", "rm", name, check=False)
        watching.wait_for("/tasks/delete")
        exits = [body["id"] for topic, body in task_events(watching.out(), name) if topic == "/tasks/exit"]

    assert sorted(exits[:-1]) == ["side0", "side1", "side2"]
    assert exits[-1] == name


@pytest.mark.parametrize("code", [0, 5])
def test_start_is_published_before_exit_even_for_a_process_that_ends_at_once(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, code: int
) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr("run", "--rm", "--runtime", runtime.name, IMAGE, name, "sh", "-c", f"exit {code}", check=False)
        watching.wait_for("/tasks/delete")
        events = task_events(watching.out(), name)

    assert [topic for topic, _ in events] == ["/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"]


def _number(metrics: dict[str, Any], where: tuple[str, str]) -> int:
    """memory.usage or cpu.usage of the metrics of either cgroup version (v1 nests a message, v2 names it
    differently).
    """
    group = metrics[where[0]]
    if where == ("cpu", "usage") and "usage_usec" in group:
        return int(group["usage_usec"])
    value = group["usage"]
    return int(value if isinstance(value, int) else value.get("usage", value.get("total", 0)))


@pytest.mark.vm
def test_a_trace_tells_where_the_time_went_until_the_first_output(ctr: Ctr, runtime: Runtime, name: str) -> None:
    command = [str(PROJECT / "bin" / "pyshim"), "trace", name]
    script = "echo up; sleep 100000"
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sh", "-c", script)

    def names() -> list[str]:
        done = subprocess.run([*command, "--json"], capture_output=True, check=True, timeout=60)
        (resource,) = json.loads(done.stdout)["resourceSpans"]
        return [span["name"] for span in resource["scopeSpans"][0]["spans"]]

    # With `--detach` ctr reads no output, but the pipe takes this much.
    eventually(lambda: "first output" in names(), what=lambda: f"the first output is in the trace: {names()}")
    assert {f"create {name}", "start vmm", "wait for agent", f"start {name}"} <= set(names())
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "wait for agent" in text
