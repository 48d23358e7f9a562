"""Many containers in a pod, and many pods whose containerd comes and goes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from .framework.cri import Cri
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm


def test_a_pod_of_fifty_containers(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        containers = [pod.start("sh", "-c", f"echo {number}; exec sleep 100000") for number in range(50)]

        assert all(container.is_running for container in containers)
        assert containers[0].sh("echo first") == "first\n"
        assert containers[-1].sh("echo last") == "last\n"
        assert [container.log() for container in containers] == [f"{number}\n" for number in range(50)]
        assert len(runtime.vmms(pod.id)) == 1


def test_ten_pods_survive_a_containerd_that_is_killed(cri: Cri, runtime: Runtime) -> None:
    """One that is asked to end is in `test_cri_restart.py`."""
    count = 10
    with contextlib.ExitStack() as pods_end:
        pods = [pods_end.enter_context(cri.pod(f"survivor{index}")) for index in range(count)]
        running = [(pod.start(), pod.start("sh", "-c", "exit 9")) for pod in pods]
        assert [ended.exit_code() for _, ended in running] == [9] * count
        shims = [[shim.pid for shim in runtime.shims(pod.id)] for pod in pods]

        cri.daemon.restart(signal.SIGKILL)
        cri.connect()

        assert [[shim.pid for shim in runtime.shims(pod.id)] for pod in pods] == shims
        for pod, (container, ended) in zip(pods, running, strict=True):
            assert pod.is_ready
            assert container.is_running
            assert ended.exit_code() == 9
            assert container.sh("echo here") == "here\n"
        for pod, (container, ended) in list(zip(pods, running, strict=True))[:2]:
            ended.remove()
            assert pod.start("echo", "new").run_to_end() == "new\n"
            container.stop(0)
            assert container.exit_code() == 137


def test_pods_that_ended_while_containerd_was_away_are_found_ended(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as lost, cri.pod() as kept:
        container = lost.start()
        neighbour = kept.start()
        (vmm,) = runtime.vmms(lost.id)

        cri.daemon.stop()
        os.kill(vmm.pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{vmm.pid}").exists(), what="the VM is gone")
        cri.daemon.start()
        cri.connect()

        assert container.exit_code() == 255
        eventually(lambda: not lost.is_ready, what="the lost pod is not ready")
        assert kept.is_ready
        assert neighbour.sh("echo fine") == "fine\n"
