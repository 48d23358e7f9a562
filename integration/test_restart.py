"""containerd goes away and comes back; the tasks stay, and stay under control."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .framework.containerd import Containerd
from .framework.ctr import Ctr
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually

_TICKS = "i=0; while :; do i=$((i+1)); echo $i > /ticks; sleep 0.2; done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_task_survives_a_containerd_restart_and_obeys_afterwards(
    containerd: Containerd,
    ctr: Ctr,
    runtime: Runtime,
    name: str,
    number: signal.Signals,
    request: pytest.FixtureRequest,
) -> None:
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sh", "-c", _TICKS)
    shims = [p.pid for p in runtime.shims(name)]
    pid_before = _pid(ctr, name)

    containerd.restart(number)

    assert ctr.state_of(name) == "RUNNING"
    assert [p.pid for p in runtime.shims(name)] == shims
    assert _pid(ctr, name) == pid_before
    first = _ticks(ctr, name)
    eventually(lambda: _ticks(ctr, name) > first, what="the task goes on working")
    ctr("task", "pause", name)
    ctr("task", "resume", name)
    ctr("task", "metrics", name)
    ctr("task", "kill", "--signal", "KILL", name)
    ctr.wait_for_state(name, "STOPPED")
    ctr("task", "rm", name, check=False)
    assert ctr.state_of(name) is None


def test_task_that_ended_while_containerd_was_away_is_found_stopped_with_its_status(
    containerd: Containerd, ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    gate = scratch / "gate"
    gate.mkdir()
    mount = f"type=bind,src={gate},dst=/gate,options=rbind:rw"
    script = "until [ -e /gate/open ]; do sleep 0.1; done; echo over > /gate/over; exit 33"
    ctr("run", "--detach", "--mount", mount, "--runtime", runtime.name, IMAGE, name, "sh", "-c", script)

    containerd.stop()
    (gate / "open").touch()
    eventually(lambda: (gate / "over").exists(), what="the task came to its end without containerd")
    containerd.start()

    ctr.wait_for_state(name, "STOPPED")
    assert "exit code 33" in ctr("task", "rm", name).err


def test_output_written_without_a_reader_does_not_end_the_task(
    containerd: Containerd, ctr: Ctr, runtime: Runtime, name: str
) -> None:
    """The reader of the FIFOs vanishes with its client: no SIGPIPE, no end of the container."""
    script = "while :; do echo line; sleep 0.1; done"
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sh", "-c", script)

    containerd.restart()

    assert ctr.state_of(name) == "RUNNING"
    assert ctr("task", "exec", "--exec-id", "still", name, "echo", "here").out == "here\n"


def _pid(ctr: Ctr, name: str) -> str:
    return next(row["PID"] for row in ctr("task", "ls").rows() if row["TASK"] == name)


def _ticks(ctr: Ctr, name: str) -> int:
    return int(ctr("task", "exec", "--exec-id", "ticks", name, "cat", "/ticks").out or 0)
