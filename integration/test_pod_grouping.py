"""A pod's containers and its one shim, by the annotations of either container runtime: what `start` and `delete` do."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.containerd import task_types_pb2, task_v2_pb2

from .conftest import GROUND, PROJECT
from .framework.faulty_pod import FaultyPod, faulty_pod
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm


def _pids(runtime: Runtime, pod: FaultyPod) -> dict[str, list[int]]:
    found = {"shim": runtime.shims(pod.name), "vmm": runtime.vmms(pod.name), "virtiofsd": runtime.virtiofsds(pod.name)}
    return {name: [process.pid for process in processes] for name, processes in found.items()}


def _status(pod: FaultyPod, container: str) -> int:
    return int(pod.shim.call("State", task_v2_pb2.StateResponse, id=container).status)


@pytest.mark.parametrize("written_by", ["cri-o", "containerd"])
def test_start_and_delete_of_an_app_container_do_only_what_is_its_own(
    runtime: Runtime, plain_rootfs: Path, written_by: str
) -> None:
    name = f"group-{written_by.replace('-', '')}"
    with faulty_pod(
        runtime, PROJECT / "bin", GROUND / "pods", plain_rootfs, name=name, subnet=40, written_by=written_by
    ) as pod:
        pod.boot()
        alone = _pids(runtime, pod)
        assert (len(alone["shim"]), len(alone["vmm"])) == (1, 1)

        assert pod.app_shim.start() == pod.shim.address
        pod.start_app()
        assert _pids(runtime, pod) == alone
        assert not runtime.vmms(pod.app)

        pod.app_shim.delete()  # as a containerd that has lost sight of one container
        assert _status(pod, pod.app) == task_types_pb2.RUNNING
        pod.end_app()
        pod.app_shim.delete()
        assert _status(pod, pod.name) == task_types_pb2.RUNNING
        assert _pids(runtime, pod) == alone
        pod.one_round()

        pod.clean_up()
        pod.assert_nothing_left()
