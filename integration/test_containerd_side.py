"""containerd's side of a pod and its shim, whatever is in the VM: life, restarts, deaths.

The pods have a stand-in for the VM, so the file is quick and shows most about a release of containerd (CONTAINERD).
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from protos.cri import v1_pb2 as pb
from pyshim.agent.samples import ANSWER_S

from .framework import load, processes, releases
from .framework.cri import Cri, Pod
from .framework.cri_session import STAND_IN_HANDLER
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

_SEED, _KILLS, _AT_ONCE = 20_261_122, load.amount(3, 12), 3
_PODS, _HUNG = load.amount(8, 20), 5
_LOST = {137, 255}
"""The exit code of a task whose shim died: the one that `delete` answers, or containerd's own."""


@pytest.fixture
def stand_in(cri: Cri) -> Iterator[Pod]:
    """A pod of two containers that run until they are ended."""
    with cri.pod(handler=STAND_IN_HANDLER) as pod:
        for _ in range(2):
            pod.start()
        yield pod


def test_one_shim_serves_all_containers_of_a_pod(cri: Cri, runtime: Runtime, stand_in: Pod) -> None:
    bundle = cri.daemon.directories.bundle(stand_in.containers[1].id, "k8s.io")
    (shim,) = runtime.shims(stand_in.id)

    if (told := bundle / "bootstrap.json").exists():
        assert json.loads(told.read_text())["version"] == releases.chosen().task_api
    stand_in.containers[1].stop(0)
    stand_in.containers[1].remove()
    stand_in.containers.pop()
    again = stand_in.start()

    assert again.is_running
    assert stand_in.containers[0].is_running
    assert [one.pid for one in runtime.shims(stand_in.id)] == [shim.pid]


def test_a_pod_obeys_the_containerd_that_comes_after_a_killed_one(cri: Cri, runtime: Runtime, stand_in: Pod) -> None:
    before = [shim.pid for shim in runtime.shims(stand_in.id)]

    cri.daemon.restart(signal.SIGKILL)
    cri.connect()

    assert stand_in.is_ready
    assert all(container.is_running for container in stand_in.containers)
    assert stand_in.start().is_running
    stand_in.containers[0].stop(0)
    assert stand_in.containers[0].status.state == pb.CONTAINER_EXITED
    assert [shim.pid for shim in runtime.shims(stand_in.id)] == before


@pytest.mark.parametrize("watched", [True, False], ids=["before containerd's eyes", "while containerd is away"])
def test_the_tasks_of_a_killed_shim_have_ended(cri: Cri, runtime: Runtime, stand_in: Pod, watched: bool) -> None:
    (shim,) = runtime.shims(stand_in.id)

    if not watched:
        cri.daemon.stop(signal.SIGKILL)
    os.kill(shim.pid, signal.SIGKILL)
    if not watched:
        eventually(lambda: not runtime.shims(stand_in.id), what="the shim is dead")
        cri.daemon.start()
        cri.connect()

    assert {container.exit_code() for container in stand_in.containers} <= _LOST
    eventually(lambda: not stand_in.is_ready, what="the pod is not ready")


def test_a_shim_that_stands_still_for_a_while_loses_no_task(cri: Cri, runtime: Runtime, stand_in: Pod) -> None:
    (shim,) = runtime.shims(stand_in.id)
    os.kill(shim.pid, signal.SIGSTOP)
    try:
        with pytest.raises(grpc.RpcError):
            cri.call("StopContainer", container_id=stand_in.containers[0].id, timeout=0, within_s=3)
        assert stand_in.containers[1].is_running
    finally:
        os.kill(shim.pid, signal.SIGCONT)

    stand_in.containers[0].stop(0)
    assert stand_in.containers[0].status.state == pb.CONTAINER_EXITED
    assert stand_in.containers[1].is_running
    assert stand_in.start().is_running


def test_an_end_that_containerd_sleeps_through_is_told_once_it_goes_on(cri: Cri, stand_in: Pod) -> None:
    (vmm,) = processes.find("qemu-system-stub", stand_in.id)

    os.kill(cri.daemon.pid, signal.SIGSTOP)
    try:
        os.kill(vmm.pid, signal.SIGKILL)
        eventually(lambda: not processes.find("qemu-system-stub", stand_in.id), what="the VM is gone")
    finally:
        os.kill(cri.daemon.pid, signal.SIGCONT)

    assert {container.exit_code() for container in stand_in.containers} <= _LOST
    eventually(lambda: not stand_in.is_ready, what="the pod is not ready")


@pytest.mark.timeout(600)
def test_hung_guests_hold_up_a_list_of_all_pods_statistics_once_and_take_nothing_from_the_others(cri: Cri) -> None:
    """A kubelet asks for all in one call, and containerd asks one shim after the other."""
    with ExitStack() as end:
        pods = [end.enter_context(cri.pod(handler=STAND_IN_HANDLER)) for _ in range(_PODS)]
        served = {pod.start().id for pod in pods[_HUNG:]}
        for pod in pods[:_HUNG]:
            pod.start()
            (vmm,) = processes.find("qemu-system-stub", pod.id)
            os.kill(vmm.pid, signal.SIGSTOP)
            end.callback(os.kill, vmm.pid, signal.SIGCONT)
        lists = []
        for _ in range(2):
            began_s = time.monotonic()
            listed = cri.call("ListContainerStats", within_s=120).stats
            lists.append(({each.attributes.id for each in listed}, time.monotonic() - began_s))

        assert all(served <= ids for ids, _ in lists)
        assert lists[1][1] < _HUNG * ANSWER_S / 2, "each guest that hangs was asked and waited for again"


@pytest.mark.timeout(600)
def test_containerd_killed_at_random_moments_under_load_leaves_every_pod_removable(cri: Cri) -> None:
    """Whatever call was under way, the next containerd finds what there is; no shim stays without a pod."""
    chance = random.Random(_SEED)
    over, away = threading.Event(), threading.Lock()
    before = cri.sandboxes()

    def load() -> None:
        """Pods are made and removed; a call that meets no containerd fails."""
        while not over.is_set():
            try:
                with cri.pod(handler=STAND_IN_HANDLER) as pod:
                    pod.start().stop(0)
            except (grpc.RpcError, AssertionError, ValueError):  # ValueError: the channel was closed meanwhile
                with away:  # until containerd is back
                    continue

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        workers = [pool.submit(load) for _ in range(_AT_ONCE)]
        try:
            for _ in range(_KILLS):
                time.sleep(chance.uniform(0.2, 4))  # the random moment: what this is about
                with away:
                    cri.daemon.restart(signal.SIGKILL)
                    cri.connect()
        finally:
            over.set()
        for worker in workers:
            worker.result()

    for sandbox in set(cri.sandboxes()) - {*before}:
        eventually(lambda sandbox=sandbox: _removed(cri, sandbox), what=f"pod {sandbox} is removed", every_s=1)  # type: ignore[misc]
    with cri.pod(handler=STAND_IN_HANDLER) as pod:
        assert pod.start().is_running


def _removed(cri: Cri, sandbox: str) -> bool:
    try:
        cri.call("StopPodSandbox", pod_sandbox_id=sandbox)
        cri.call("RemovePodSandbox", pod_sandbox_id=sandbox)
    except grpc.RpcError:
        return False
    return True
