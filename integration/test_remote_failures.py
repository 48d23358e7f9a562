"""A peer that fails, lies, hangs or dies; shims and VMs that die: each VM is stopped, and nothing is left anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .framework.containerd import Containerd
from .framework.ctr import Background, Ctr
from .framework.remote_peer import RemotePeer, RemoteRun
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .test_cleanup import pyshim

pytestmark = pytest.mark.vm

_REFUSED = {
    "CreateVM:before=error(no quota left)": "no quota left",
    "CreateVM:after=empty": "socket",
    "CreateVM:before=drop": "closed the connection",
    "CreateVM:after=drop": "closed the connection",
    "StartVM:before=error(no capacity in this zone)": "no capacity in this zone",
    "StartVM:after=drop": "closed the connection",
}


def nothing_runs(peer: RemotePeer, runtime: Runtime, name: str) -> None:
    """No VM, no record of one, no shim; at the latest after the clean-up."""
    eventually(
        lambda: not (peer.vms() or peer.records() or runtime.shims(name) or runtime.persisted(name).exists()),
        what=lambda: f"nothing is left of {name}: {peer.vms()} {peer.records()} {peer.log_tail()}",
        within_s=90,
    )


@pytest.mark.parametrize("fault", list(_REFUSED))
def test_a_pod_whose_vm_is_refused_fails_with_the_reason_and_leaves_nothing(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, fault: str
) -> None:
    with peer.faults(fault):
        result = ctr(*remote_run("refused"), name, "true", check=False)

    assert result.code != 0
    assert _REFUSED[fault] in result.err
    nothing_runs(peer, runtime, name)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_vm_made_after_its_shim_has_given_up_is_stopped(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path, moment: str
) -> None:
    config = peer.configuration(scratch, remote_hypervisor_timeout=2)

    with peer.faults(f"CreateVM:{moment}=delay(5)"):
        result = ctr(*remote_run("late", config=config), name, "true", check=False)

    assert f"create remote vm {name!r}" in result.err, result
    nothing_runs(peer, runtime, name)


def test_without_a_peer_the_error_names_its_socket(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    config = peer.configuration(scratch, remote_hypervisor_socket="/run/nobody.sock")

    result = ctr(*remote_run("nobody", config=config), name, "true", check=False)

    assert "'/run/nobody.sock'" in result.err
    nothing_runs(peer, runtime, name)


def test_a_peer_that_dies_between_create_and_start_is_asked_again_when_it_is_back(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, *remote_run("unlucky"), name, "true") as running:
        with peer.faults("StartVM:before=die"):
            peer.wait_dead()
        assert [record["id"] for record in peer.records()] == [name], "CreateVM is on the peer's record"
        peer.start()
        result = running.wait()

    assert result.code != 0
    nothing_runs(peer, runtime, name)


_STEPS = {
    "CreateVM is asked": ("CreateVM:before=delay(4)", "CreateVM"),
    "CreateVM is done": ("CreateVM:after=hang", "CreateVM"),
    "StartVM is asked": ("StartVM:before=hang", "StartVM"),
    "StartVM is done": ("StartVM:after=hang", "StartVM"),
}


@pytest.mark.parametrize("step", list(_STEPS))
def test_a_shim_killed_while_its_vm_is_made_leaves_no_vm(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path, step: str
) -> None:
    fault, method = _STEPS[step]
    asked = peer.asked(method)
    with peer.faults(fault), ctr.background(scratch, *remote_run("killed"), name, "true") as running:
        eventually(lambda: peer.asked(method) > asked, what=f"{method} was asked")
        if step.endswith("done"):
            eventually(lambda: _is_done(peer, method), what=f"{method} is done", within_s=120)
        kill_shim(runtime, name)
        result = running.wait()

        assert result.code != 0
        nothing_runs(peer, runtime, name)


def _is_done(peer: RemotePeer, method: str) -> bool:
    records = peer.records()
    if method == "CreateVM":
        return bool(records)
    return bool(records) and "fault: " in peer.log.read_text(errors="replace").rpartition("--> StartVM")[2]


def kill_shim(runtime: Runtime, name: str) -> None:
    for process in eventually(lambda: runtime.shims(name), what="the shim is there"):
        os.kill(process.pid, signal.SIGKILL)


@contextmanager
def running_pod(ctr: Ctr, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path) -> Iterator[Background]:
    """A pod on a remote VM whose process is up."""
    with ctr.background(scratch, *remote_run("web"), name, "sh", "-c", "echo up; sleep 100000") as running:
        running.wait_for("up", within_s=120)
        assert [record["id"] for record in peer.records()] == [name]
        yield running


def test_a_shim_killed_while_its_pod_runs_leaves_no_vm(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    with running_pod(ctr, peer, remote_run, name, scratch) as running:
        kill_shim(runtime, name)
        result = running.wait()

    assert result.code != 0
    nothing_runs(peer, runtime, name)


def test_a_hung_shim_is_waited_for_and_its_vm_stopped_when_it_has_ended(
    containerd: Containerd,
    ctr: Ctr,
    runtime: Runtime,
    peer: RemotePeer,
    remote_run: RemoteRun,
    name: str,
    scratch: Path,
) -> None:
    """It may be in the middle of StopVM, so `delete` leaves a process that sees to its end and to that of its VM."""
    with running_pod(ctr, peer, remote_run, name, scratch):
        (shim,) = runtime.shims(name)
        os.kill(shim.pid, signal.SIGSTOP)
        containerd.restart(signal.SIGKILL)
        ctr.wait_for_state(name, None)
        assert [process.pid for process in runtime.shims(name)] == [shim.pid]
        assert len(peer.vms()) == 1

        os.kill(shim.pid, signal.SIGKILL)

        nothing_runs(peer, runtime, name)


def test_a_vm_that_dies_ends_its_task_and_leaves_nothing(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    with running_pod(ctr, peer, remote_run, name, scratch) as running:
        (vm,) = peer.vms()
        os.kill(vm.pid, signal.SIGKILL)
        result = running.wait()

    assert result.code != 0
    nothing_runs(peer, runtime, name)


def test_a_lost_peer_ends_the_task_and_the_vm_is_stopped_once_there_is_a_peer_again(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    with running_pod(ctr, peer, remote_run, name, scratch) as running:
        peer.end(signal.SIGKILL)
        assert len(peer.vms()) == 1, "a VM does not need its peer"
        peer.start()
        result = running.wait()

    assert result.code != 0
    nothing_runs(peer, runtime, name)


def test_a_vm_whose_shim_and_peer_died_is_stopped_by_the_operators_cleanup(
    containerd: Containerd,
    ctr: Ctr,
    runtime: Runtime,
    peer: RemotePeer,
    remote_run: RemoteRun,
    name: str,
    scratch: Path,
) -> None:
    with running_pod(ctr, peer, remote_run, name, scratch):
        containerd.stop(signal.SIGKILL)
        peer.end(signal.SIGKILL)
        kill_shim(runtime, name)
        eventually(lambda: not runtime.shims(name), what="the shim is dead")
        without = pyshim("cleanup", name, within_s=240)
        vms = len(peer.vms())
        peer.start()
        done = pyshim("cleanup", name, within_s=240)

    assert without.returncode != 0
    assert "remote hypervisor" in without.stdout + without.stderr
    assert vms == 1
    assert (done.returncode, done.stderr) == (0, "")
    nothing_runs(peer, runtime, name)
    containerd.start()
    ctr.wait_for_state(name, None)


def test_a_stop_that_hangs_is_asked_again_of_the_next_peer(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    stopped = peer.asked("StopVM")
    with ctr.background(scratch, *remote_run("stuck"), name, "sh", "-c", "echo up; sleep 5") as running:
        running.wait_for("up", within_s=120)
        with peer.faults("StopVM:before=hang"):
            eventually(lambda: peer.asked("StopVM") > stopped, what="StopVM was asked")
        peer.end(signal.SIGKILL)
        peer.start()
        running.wait()

    nothing_runs(peer, runtime, name)
