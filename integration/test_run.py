"""`ctr run`: a command in a container of its own, its output, the machine it sees."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from .conftest import RunTask
from .framework.ctr import Ctr
from .framework.events import task_events, until_watching
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually


@pytest.mark.vm
def test_container_runs_on_a_kernel_of_its_own(run: RunTask) -> None:
    guest = run("uname", "-r").out.strip()

    assert guest
    assert guest != platform.release()


def test_terminal_run_is_a_session_on_a_terminal(ctr: Ctr, name: str) -> None:
    script = "echo ready; read line; echo got $line; tty; stty size; exit 7"
    with ctr.on_terminal(
        *ctr.run_words("--rm", "-t"), IMAGE, name, "sh", "-c", script, rows=31, columns=91
    ) as terminal:
        terminal.read_until("ready")
        terminal.type("hello\n")
        terminal.read_until("got hello")
        terminal.read_until("31 91")

        assert terminal.wait() == 7


def test_a_container_has_the_device_that_it_was_given_and_opens_no_other(run: RunTask) -> None:
    # Making the node is refused, or opening what was made.
    script = "stat -c '%F %t:%T' /dev/fuse; mknod /dev/kmsg c 1 11 && head -c 1 /dev/kmsg && echo opened"

    result = run("sh", "-c", script, options=["--device", "/dev/fuse"], code=None)

    assert result.out == "character special file a:e5\n"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("/no/such/program", "stat /no/such/program: no such file or directory"),
        ("no-such-program", 'exec: "no-such-program": executable file not found in $PATH'),
    ],
)
def test_missing_program_fails_the_run_and_names_it(run: RunTask, program: str, problem: str) -> None:
    """Docker ends with 127 by these words."""
    result = run(program, code=None)

    assert result.code != 0
    assert problem in result.err


def test_output_of_a_process_that_ends_at_once_is_complete(run: RunTask) -> None:
    size = 3_000_000

    result = run("sh", "-c", f"head -c {size} /dev/zero | tr '\\0' 'x'")

    assert len(result.stdout) == size
    assert set(result.stdout) == {ord("x")}


@pytest.mark.vm
def test_a_lone_container_that_fills_its_memory_is_reported(ctr: Ctr, run: RunTask, name: str, scratch: Path) -> None:
    """It is its own sandbox. Docker's OOMKilled comes of the event."""
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        fill = "x=x; while :; do x=$x$x; done"
        ran = run("sh", "-c", fill, options=["--memory-limit", str(32 << 20)], code=None)
        eventually(lambda: "/tasks/oom" in [topic for topic, _ in task_events(watching.out(), name)], what="an event")

    assert ran.code == 137


def test_persisted_state_names_the_vmm_and_the_size_of_the_vm(ctr: Ctr, runtime: Runtime, shared: str) -> None:
    state = json.loads(runtime.persisted(shared).read_text())

    assert state["PersistVersion"] == 2
    assert [p.pid for p in runtime.vmms(shared)] == [state["HypervisorState"]["Pid"]]


@pytest.mark.vm
def test_pid_of_the_task_is_the_vmms(ctr: Ctr, runtime: Runtime, shared: str) -> None:
    pids = {row["TASK"]: row["PID"] for row in ctr("task", "ls").rows()}

    assert pids[shared] == str(runtime.vmms(shared)[0].pid)


@pytest.mark.vm
def test_vmm_and_shim_run_outside_no_foreign_descriptor(runtime: Runtime, shared: str) -> None:
    """A descriptor of containerd's inherited by a daemon would keep `start` from ending, or a socket from closing."""
    for process in (*runtime.shims(shared), *runtime.vmms(shared)):
        targets = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert not [t for t in targets if "containerd.sock" in t or t.startswith("/run/pyshim-integration")], process
