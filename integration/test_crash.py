"""kill -9 of each process of a running pod: the task ends with a status, its client sees it, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .framework import boots
from .framework.containerd import Containerd
from .framework.ctr import Ctr
from .framework.events import task_events, until_watching
from .framework.images import IMAGE
from .framework.processes import Process
from .framework.runtime import Runtime
from .framework.waiting import eventually

_VICTIMS: dict[str, Callable[[Runtime, str], list[Process]]] = {
    "shim": Runtime.shims,
    "vmm": Runtime.vmms,
    "virtiofsd": Runtime.virtiofsds,
    "vsock program": Runtime.vsock_programs,
}


@pytest.mark.vm  # the reference shim has no VMM, and leaves its socket behind when killed
@pytest.mark.parametrize("victim", list(_VICTIMS))
def test_killed_part_of_a_pod_ends_its_task_with_an_exit_event_and_leaves_nothing(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, victim: str
) -> None:
    if victim == "vsock program" and not runtime.has_vsock_program:
        pytest.skip("needs `scripts/integration --vsock`")
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        words = (*ctr.run_words(), IMAGE, name, "sh", "-c", "echo up; sleep 100000")
        with ctr.background(scratch, *words) as running:
            running.wait_for("up")
            found = _VICTIMS[victim](runtime, name)
            assert found, f"a {victim} process serves {name!r}"
            for process in found:
                with contextlib.suppress(ProcessLookupError):  # the end of one may have been the end of the other
                    os.kill(process.pid, signal.SIGKILL)

            watching.wait_for("/tasks/exit")
            result = running.wait(60)

        events = task_events(watching.out(), name)
    exits = [body for topic, body in events if topic == "/tasks/exit"]
    assert exits[0]["exit_status"] in (137, 255)
    assert result.code != 0
    # The task may still be listed as stopped, which depends on who died; it can be removed either way.
    ctr("task", "rm", "--force", name, check=False)
    assert ctr.state_of(name) is None
    ctr("container", "rm", name)
    # containerd's answer does not wait for the shim to be gone.
    eventually(lambda: not [p for find in _VICTIMS.values() for p in find(runtime, name)], what="every process is gone")


@pytest.mark.vm
def test_a_task_whose_guest_hangs_is_killed_with_an_exit_event_and_removed(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, "events") as watching:
        until_watching(ctr, watching.out)
        ctr.start(name)
        (vmm,) = runtime.vmms(name)
        os.kill(vmm.pid, signal.SIGSTOP)

        ctr("task", "kill", "--signal", "KILL", name)

        watching.wait_for("/tasks/exit")
        events = task_events(watching.out(), name)
    assert [body["exit_status"] for topic, body in events if topic == "/tasks/exit"] == [137]
    ctr("task", "rm", name)
    ctr("container", "rm", name)
    assert not runtime.vmms(name)


@pytest.mark.vm
def test_a_hung_shim_is_ended_with_its_vm_by_the_containerd_that_cannot_reach_it(
    containerd: Containerd, ctr: Ctr, runtime: Runtime, name: str
) -> None:
    ctr.start(name)
    for process in runtime.shims(name):
        os.kill(process.pid, signal.SIGSTOP)

    containerd.restart(signal.SIGKILL)

    eventually(lambda: not [p for find in _VICTIMS.values() for p in find(runtime, name)], what="every process is gone")
    ctr.wait_for_state(name, None)
    ctr("container", "rm", name)


@pytest.mark.vm
def test_shim_killed_while_its_vm_boots_leaves_nothing(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    with ctr.background(scratch, *ctr.run_words("--rm"), IMAGE, name, "true") as running:
        eventually(lambda: runtime.vmms(name), what="the VMM is there", every_s=0.01)
        for process in runtime.shims(name):
            os.kill(process.pid, signal.SIGKILL)

        assert running.wait(60).code != 0


@pytest.mark.vm
@pytest.mark.skipif(boots.is_warm("test_crash"), reason="a pod boots when the VMM of its clone is killed")
def test_vmm_killed_while_it_boots_fails_the_run_and_leaves_nothing(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, *ctr.run_words("--rm"), IMAGE, name, "true") as running:
        found = eventually(lambda: runtime.vmms(name), what="the VMM is there", every_s=0.01)
        os.kill(found[0].pid, signal.SIGKILL)

        result = running.wait(60)

    assert result.code != 0
    assert "SIGKILL" in result.stderr.decode() or "killed" in result.stderr.decode()


@pytest.mark.vm
def test_client_that_gives_up_while_the_vm_boots_leaves_nothing(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, *ctr.run_words(), IMAGE, name, "sleep", "100000") as running:
        eventually(lambda: runtime.vmms(name), what="the VMM is there", every_s=0.01)
        running.process.kill()
        running.wait()

    # containerd goes on with a creation whose caller has gone; once it is there it can be removed like any other.
    eventually(
        lambda: ctr.state_of(name) in (None, "CREATED"), what="the abandoned task is created or gone", every_s=0.2
    )
    ctr.remove([name])
