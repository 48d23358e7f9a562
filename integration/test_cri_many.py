"""Many containers in a pod."""

from __future__ import annotations

import pytest

from .framework import load
from .framework.cri import Cri
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm
_COUNT = load.amount(12, 50)


def test_a_pod_of_many_containers(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        containers = [pod.start("sh", "-c", f"echo {number}; exec sleep 100000") for number in range(_COUNT)]

        assert all(container.is_running for container in containers)
        assert containers[0].sh("echo first") == "first\n"
        assert containers[-1].sh("echo last") == "last\n"
        assert [container.log() for container in containers] == [f"{number}\n" for number in range(_COUNT)]
        assert len(runtime.vmms(pod.id)) == 1
