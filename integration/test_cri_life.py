"""A pod's life: one VM for all its containers, which come and go in any order; its end, wanted or not."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import grpc
import pytest

from .framework import releases
from .framework.cri import Container, Cri, Pod, refusal
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
needs_pause_container = pytest.mark.skipif(releases.sandboxer() == "shim", reason="there is no pause container")

_IGNORES_TERM = "trap '' TERM; echo armed; while :; do sleep 0.1; done"


def _boot_id(container: Container) -> str:
    return container.sh("cat /proc/sys/kernel/random/boot_id")


def test_a_pods_containers_share_one_vm(cri: Cri, pod: Pod, runtime: Runtime) -> None:
    first, second = pod.start(), pod.start()

    assert _boot_id(first) == _boot_id(second)
    assert len(runtime.vmms(pod.id)) == 1
    assert [len(runtime.shims(container.id)) for container in (first, second)] == [0, 0]
    assert len(runtime.shims(pod.id)) == 1


def test_the_vm_outlives_its_last_container(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        container = pod.start("sh", "-c", "exit 0")
        assert container.exit_code() == 0
        container.remove()

        assert pod.is_ready
        assert len(runtime.vmms(pod.id)) == 1
        assert pod.start("echo", "again").run_to_end() == "again\n"


def test_containers_restart_under_the_same_name_while_others_run(cri: Cri, pod: Pod) -> None:
    """As the kubelet does with restartPolicy Always: a new attempt, then the old one is removed."""
    neighbour = pod.start()
    old = pod.start("sh", "-c", "exit 1", name="worker", attempt=0)
    assert old.exit_code() == 1
    new = pod.start(name="worker", attempt=1)
    old.remove()
    newest = pod.create("echo", "third", name="worker", attempt=2)
    new.stop(0)
    new.remove()
    newest.start()

    assert newest.run_to_end() == "third\n"
    assert neighbour.is_running


def test_containers_created_together_start_in_any_order(cri: Cri, pod: Pod) -> None:
    created = [pod.create("echo", str(number)) for number in range(3)]

    for container in reversed(created):
        container.start()

    assert [container.run_to_end() for container in created] == ["0\n", "1\n", "2\n"]


def test_a_program_that_does_not_exist_fails_the_start_and_leaves_the_pod_usable(cri: Cri, pod: Pod) -> None:
    container = pod.create("/no/such/program")

    assert "no/such/program" in refusal(container.start)

    assert container.exit_code() == 128
    assert container.status.reason == "StartError"
    assert pod.start("echo", "fine").run_to_end() == "fine\n"


def _wait_until_armed(container: Container) -> None:
    eventually(lambda: "armed" in container.log(), what="the trap is set")


def test_stop_waits_for_the_grace_period_then_kills(cri: Cri, pod: Pod) -> None:
    """SIGTERM, the grace period, SIGKILL; a container that obeys ends at once with its own status."""
    stubborn = pod.start("sh", "-c", _IGNORES_TERM)
    obedient = pod.start("sh", "-c", "trap 'exit 7' TERM; echo armed; while :; do sleep 0.1; done")
    for container in (stubborn, obedient):
        _wait_until_armed(container)

    obedient.stop(60)
    stubborn.stop(1)

    assert obedient.exit_code() == 7
    assert stubborn.exit_code() == 137


def test_a_slow_containers_stop_delays_no_other(cri: Cri, pod: Pod) -> None:
    slow, other = pod.start("sh", "-c", _IGNORES_TERM), pod.start()
    _wait_until_armed(slow)
    stopping = threading.Thread(target=slow.stop, args=(30,))
    stopping.start()

    assert other.sh("echo quick") == "quick\n"
    third = pod.start("echo", "third")
    assert third.run_to_end() == "third\n"
    third.remove()
    cri.call("ContainerStats", container_id=other.id)
    other.stop(0)

    assert slow.is_running
    assert stopping.is_alive()
    slow.stop(0)
    stopping.join()
    assert slow.exit_code() == 137


def test_a_container_that_floods_its_log_delays_no_other(cri: Cri, pod: Pod) -> None:
    """More output than the log takes fills every buffer on the way; calls of this and other containers go on."""
    flooding = pod.start("sh", "-c", "yes")
    other = pod.start()

    for _ in range(3):
        assert other.sh("echo quick") == "quick\n"
    assert flooding.sh("echo quick too") == "quick too\n"

    flooding.stop(0)
    flooding.remove()


def test_stop_and_remove_of_a_pod_may_be_repeated(cri: Cri) -> None:
    with cri.pod() as pod:
        container = pod.start()

        for _ in range(2):
            pod.stop()
        assert not pod.is_ready
        assert container.exit_code() == 137
        for _ in range(2):
            cri.call("RemovePodSandbox", pod_sandbox_id=pod.id)

    assert pod.id not in cri.sandboxes()
    assert container.id not in cri.containers()


@needs_pause_container
def test_the_end_of_the_sandbox_task_ends_its_containers_and_the_vm(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        containers = [pod.start(), pod.start()]

        cri.daemon.ctr("--namespace", "k8s.io", "task", "kill", "--signal", "KILL", pod.id)

        assert [container.exit_code() for container in containers] == [137, 137]
        eventually(lambda: not pod.is_ready, what="the sandbox is not ready")
        eventually(lambda: not runtime.vmms(pod.id), what="the VM is gone")


def test_a_lost_guest_ends_every_task_with_255(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        containers = [pod.start(), pod.start("sh", "-c", _IGNORES_TERM)]
        (vmm,) = runtime.vmms(pod.id)

        os.kill(vmm.pid, signal.SIGKILL)

        assert [container.exit_code() for container in containers] == [255, 255]
        eventually(lambda: not pod.is_ready, what="the sandbox is not ready")
        with pytest.raises(grpc.RpcError):
            pod.start()


def test_a_pod_whose_guest_hangs_is_stopped_and_removed(cri: Cri, runtime: Runtime) -> None:
    """StopPodSandbox kills the containers first, and would never get to the sandbox if that could not be done."""
    with cri.pod() as pod:
        containers = [pod.start(), pod.start()]
        (vmm,) = runtime.vmms(pod.id)
        os.kill(vmm.pid, signal.SIGSTOP)

        pod.stop()

        assert sorted(container.exit_code() for container in containers) == [137, 255]
        assert not runtime.vmms(pod.id)


def test_a_pod_is_recreated_after_its_loss(cri: Cri, runtime: Runtime) -> None:
    """The kubelet's answer to a sandbox that is not ready: the same pod with the next attempt."""
    with cri.pod("phoenix") as pod:
        (vmm,) = runtime.vmms(pod.id)
        os.kill(vmm.pid, signal.SIGKILL)
        eventually(lambda: not pod.is_ready, what="the sandbox is not ready")
        pod.stop()
        again = type(pod.config).FromString(pod.config.SerializeToString())
        again.metadata.attempt = 1
        second = Pod.run(cri, again)
        try:
            assert second.start("echo", "back").run_to_end() == "back\n"
        finally:
            second.remove()


@needs_pause_container
def test_the_sandbox_container_brings_nothing_into_the_guest(cri: Cri) -> None:
    """Neither its image nor a mount of it: only a shared pid namespace needs a process to hold it."""
    with cri.pod() as pod, cri.pod(share_processes=True) as sharing:
        for each in (pod, sharing):
            each.start()

        assert not _shared(pod, pod.id)
        assert _shared(sharing, sharing.id)
        assert _shared(pod, pod.containers[0].id)
        mounted = Path("/proc/self/mountinfo").read_text()
        assert f"{pod.id}/rootfs" not in mounted
        assert f"{sharing.id}/rootfs" in mounted


def _shared(pod: Pod, container_id: str) -> bool:
    """True if the container's root file system is in the pod's share."""
    return Path("/run/kata-containers/shared/sandboxes", pod.id, "mounts", container_id).exists()
