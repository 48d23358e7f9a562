"""What Kubernetes has come to offer a pod since 1.28, through a real kubelet, and what it comes to in a VM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.framework import releases
from integration.framework.cri import CRI_IMAGE
from integration.framework.waiting import eventually
from pyshim.model.units import MIB

from . import peers
from .cluster import NODE, Cluster, container, manifest

pytestmark = pytest.mark.vm

SLEEP = "exec sleep 100000"
since_2 = pytest.mark.skipif(releases.chosen().numbers < (2, 1), reason="needs containerd 2.1 (CONTAINERD=newest)")


def test_limits_of_the_whole_pod_size_its_vm(kube: Cluster) -> None:
    """`resources` of the pod, with none of its containers."""
    script = "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo"
    whole = {"limits": {"cpu": "1", "memory": "256Mi"}}
    with kube.running("whole", container(script), container("true", "second"), resources=whole):
        kube.phase("whole", "Succeeded", "Failed")
        processors, memory_kib = map(int, kube.log("whole").split())

    assert processors == 2  # 1 and the overhead of 0.25, rounded up once
    assert 256 <= memory_kib / 1024 <= 256 + 112


@since_2
def test_an_image_is_a_volume_that_is_only_read(kube: Cluster) -> None:
    script = "ls /image/bin; (echo x >/image/written) 2>/dev/null || echo read-only"
    volumes = [{"name": "image", "image": {"reference": CRI_IMAGE, "pullPolicy": "Never"}}]
    mounts: dict[str, Any] = {"volumeMounts": [{"name": "image", "mountPath": "/image"}]}
    with kube.running("image-volume", container(script, **mounts), volumes=volumes):
        kube.phase("image-volume", "Succeeded", "Failed")
        said = kube.log("image-volume").splitlines()

    assert "busybox" in said
    assert said[-1] == "read-only"


def test_a_pod_sleeps_before_it_is_stopped_and_its_signal_is_its_own(kube: Cluster, scratch: Path) -> None:
    """`preStop.sleep`, then `stopSignal` in place of SIGTERM."""
    script = "trap 'date >/out/USR1; exit 0' USR1; trap 'date >/out/TERM; exit 0' TERM;"
    script += " while :; do date >/out/alive; sleep 0.2; done"
    (scratch / "out").mkdir()
    volumes = [{"name": "out", "hostPath": {"path": str(scratch / "out")}}]
    mounts = [{"name": "out", "mountPath": "/out"}]
    life = {"preStop": {"sleep": {"seconds": 5}}, "stopSignal": "SIGUSR1"}
    asked = scratch / "out" / "asked"
    spec = {"os": {"name": "linux"}, "terminationGracePeriodSeconds": 60, "volumes": volumes}

    kube.create("pods", manifest("sleeps", container(script, lifecycle=life, volumeMounts=mounts), **spec))
    kube.phase("sleeps", "Running")
    eventually((scratch / "out" / "alive").exists, what="the program runs")
    asked.write_text("")
    kube.delete("sleeps")

    assert {path.name for path in (scratch / "out").iterdir()} == {"alive", "asked", "USR1"}
    assert (scratch / "out" / "USR1").stat().st_mtime - asked.stat().st_mtime >= 5


HOLDS = f"dd if=/dev/zero of=/dev/shm/held bs=1M count=40; dd if=/dev/zero of=/written bs=1M count=8; {SLEEP}"
_GATE = "PodAndContainerStatsFromCRI"


@pytest.fixture(scope="module", params=["cAdvisor", "CRI"])
def source(kube: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """From where the kubelet takes the figures of pods."""
    with kube.kubelet_with(featureGates={**peers.GATES, _GATE: request.param == "CRI"}):
        yield request.param


@since_2
def test_each_container_has_its_own_figures(kube: Cluster, source: str) -> None:
    """Those of the guest: in the summary from both sources, in the metrics from CRI only; cAdvisor has the pod."""
    with kube.running("figures", container(HOLDS), container(SLEEP, "idle")):
        kube.phase("figures", "Running")
        pod = eventually(
            lambda: _complete(_pod_figures(kube, "figures")),
            what=lambda: f"figures of the pod: {_pod_figures(kube, 'figures')}",
        )
        scraped = str(kube.call("GET", f"/api/v1/nodes/{NODE}/proxy/metrics/cadvisor")).splitlines()

    main, idle = (each for name in ("main", "idle") for each in pod["containers"] if each["name"] == name)
    assert 40 * MIB < main["memory"]["workingSetBytes"] < 60 * MIB
    assert idle["memory"]["workingSetBytes"] < 10 * MIB
    assert main["cpu"]["usageCoreNanoSeconds"] > idle["cpu"]["usageCoreNanoSeconds"] > 0
    assert (main["rootfs"]["usedBytes"], idle["rootfs"]["usedBytes"]) == (8 * MIB, 0)
    names = {name for name in ("main", "idle") for line in scraped if f'container="{name}"' in line}
    assert names == ({"main", "idle"} if source == "CRI" else set())


def _pod_figures(kube: Cluster, name: str) -> Any:
    return next((each for each in kube.stats()["pods"] if each["podRef"]["name"] == name), {})


def _complete(pod: Any) -> Any:
    """The figures, once the first container has done what it does and the pod's are those of its VM, which are more."""
    containers = {each["name"]: each for each in pod.get("containers", ())}
    main = containers.get("main", {})
    held = main.get("memory", {}).get("workingSetBytes", 0)
    written = main.get("rootfs", {}).get("usedBytes", 0)
    of_vm = pod.get("memory", {}).get("workingSetBytes", 0)
    return pod if len(containers) == 2 and of_vm > held > 40 * MIB and written >= 8 * MIB else None
