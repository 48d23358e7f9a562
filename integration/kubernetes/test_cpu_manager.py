"""The kubelet's static CPU manager and its topology manager: CPUs that are a pod's alone are its VM's alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.framework.runtime import Runtime
from integration.framework.waiting import eventually

from .cluster import KUBELET_FILES, Cluster, container

pytestmark = pytest.mark.vm

SLEEP = "exec sleep 100000"
CLASS = "memory-only"
"""Its overhead is: a node of two CPUs has one left beside the reserved one, and the pod asks for all of it."""
_STATIC = {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0", "topologyManagerPolicy": "single-numa-node"}


@pytest.fixture(scope="module")
def static(kube: Cluster) -> Iterator[None]:
    with kube.runtime_class(CLASS, "pykata", memory="320Mi"), kube.kubelet_with(**_STATIC):
        yield


@contextlib.contextmanager
def pod(kube: Cluster, name: str, **more: Any) -> Iterator[Any]:
    with kube.running(name, container(SLEEP, **more), runtimeClassName=CLASS):
        yield kube.phase(name, "Running")


def cpus_of_vm(kube: Cluster, name: str) -> set[int]:
    """The CPUs on which any thread of the pod's VMM may run."""
    (sandbox,) = (each.id for each in kube.cri.call("ListPodSandbox").items if each.metadata.name == name)
    (vmm,) = Runtime.chosen().vmms(sandbox)
    found: set[int] = set()
    for thread in Path(f"/proc/{vmm.pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # one of QEMU's helpers has ended
            found |= os.sched_getaffinity(int(thread.name))
    return found


def cpus_given(uid: str) -> set[int]:
    """The CPUs that the kubelet has noted as the container's own."""
    noted = json.loads((KUBELET_FILES / "cpu_manager_state").read_text())["entries"][uid]["main"]
    found: set[int] = set()
    for part in noted.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs: one is reserved")
def test_a_guaranteed_pods_cpu_is_its_vms_alone(kube: Cluster, static: None) -> None:
    whole = {"cpu": "1", "memory": "64Mi"}
    with pod(kube, "shares"):
        assert 0 in cpus_of_vm(kube, "shares")
        with pod(kube, "exclusive", resources={"limits": whole, "requests": whole}) as made:
            assert made["status"]["qosClass"] == "Guaranteed"
            given = cpus_given(made["metadata"]["uid"])
            assert len(given) == 1
            assert cpus_of_vm(kube, "exclusive") == given
            # The kubelet takes the CPU from all others, the next time it looks.
            eventually(
                lambda: not cpus_of_vm(kube, "shares") & given,
                what=lambda: f"the other VM leaves {given}: it has {cpus_of_vm(kube, 'shares')}",
            )
        eventually(lambda: given <= cpus_of_vm(kube, "shares"), what="the other VM has the CPU again")
