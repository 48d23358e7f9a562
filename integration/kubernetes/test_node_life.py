"""Pods whose node goes down: drained, shut down with notice, without notice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.framework import cri_session, processes, zygote
from integration.framework.leaks import cgroup_roots
from integration.framework.waiting import eventually

from .cluster import BUS, GROUND, Cluster, container, manifest
from .logind import logind

pytestmark = pytest.mark.vm

SLEEP = "exec sleep 100000"
POLITE = "trap 'sleep 1; echo ended >/out/$HOSTNAME; exit 0' TERM; while :; do sleep 0.2; done"
DEAF = "trap '' TERM; while :; do sleep 0.2; done"
PERIOD_S = 120
"""Of the shutdown; twenty seconds of it are for critical pods, of which there are none."""


def vmms() -> list[processes.Process]:
    return [each for each in processes.running() if each.command and "qemu-system-" in each.command[0]]


@contextlib.contextmanager
def three_pods(kube: Cluster, out: Path) -> Iterator[tuple[str, ...]]:
    """Two that end when they are asked to and write so to `out`, one that has to be killed."""
    out.mkdir(exist_ok=True)
    volumes = [{"name": "out", "hostPath": {"path": str(out)}}]
    mounts: dict[str, Any] = {"volumeMounts": [{"name": "out", "mountPath": "/out"}]}
    names = {"polite1": (POLITE, 60), "polite2": (POLITE, 60), "deaf": (DEAF, 2)}
    for name, (script, grace_s) in names.items():
        spec = {"volumes": volumes, "restartPolicy": "Always", "terminationGracePeriodSeconds": grace_s}
        kube.create("pods", manifest(name, container(script, **mounts), **spec))
    try:
        for name in names:
            kube.phase(name, "Running")
        assert len(vmms()) == len(names)
        yield tuple(names)
    finally:
        for name in names:
            kube.delete(name, 0)


def test_a_drain_lets_programs_end_and_leaves_no_vm(kube: Cluster, scratch: Path) -> None:
    with three_pods(kube, scratch / "out") as names:
        for name in names:
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
            kube.call("POST", f"/api/v1/namespaces/default/pods/{name}/eviction", eviction)
        eventually(lambda: not any(map(kube.exists, names)), what="the pods are gone", within_s=PERIOD_S, every_s=0.3)
        assert vmms() == []
    assert {path.name: path.read_text() for path in (scratch / "out").iterdir()} == {
        "polite1": "ended\n",
        "polite2": "ended\n",
    }


def test_a_shutdown_with_notice_waits_until_every_vm_has_ended(kube: Cluster, scratch: Path) -> None:
    """The kubelet delays the shutdown by a lock of logind's; when it gives it back, the machine goes down."""
    periods = {"shutdownGracePeriod": f"{PERIOD_S}s", "shutdownGracePeriodCriticalPods": "20s"}
    with logind(BUS) as login, kube.kubelet_with(**periods), three_pods(kube, scratch / "out") as names:
        assert login.is_delayed
        login.begin_shutdown()
        eventually(lambda: not login.is_delayed, what="the kubelet lets the shutdown go on", within_s=250)
        assert vmms() == []
        assert sorted(path.name for path in (scratch / "out").iterdir()) == ["polite1", "polite2"]
        told = [kube.phase(name, "Failed", "Succeeded")["status"] for name in names]
        assert all("imminent node shutdown" in condition_of(each, "DisruptionTarget") for each in told), told


def test_under_memory_pressure_the_pod_that_is_furthest_above_its_request_goes(kube: Cluster) -> None:
    """The kubelet ranks pods by what their cgroups use, VMM and guest included, above request and overhead."""
    resources = {"requests": {"memory": "64Mi"}, "limits": {"memory": "768Mi"}}
    mounts: dict[str, Any] = {"volumeMounts": [{"name": "ram", "mountPath": "/ram"}], "resources": resources}
    volumes = [{"name": "ram", "emptyDir": {"medium": "Memory"}}]
    filled = container(f"dd if=/dev/zero of=/ram/file bs=1M count=500; {SLEEP}", **mounts)
    with (
        kube.running("small", container(SLEEP, **mounts), volumes=volumes),
        kube.running("large", filled, volumes=volumes),
    ):
        for name in ("small", "large"):
            kube.phase(name, "Running")
        eventually(lambda: working_set(kube, "large") > 500 << 20, what="the kubelet has seen it", within_s=150)
        kube.kubelet.stop()
        # A hard threshold would be taken from what pods may have, and none would be let in again.
        kube.configure_kubelet(
            evictionSoft={"memory.available": "99%"}, evictionSoftGracePeriod={"memory.available": "1s"}
        )
        try:
            kube.kubelet.start()
            gone = kube.phase("large", "Failed")["status"]
            # The node is never rid of its pressure, so the other one follows, about two seconds later.
            assert evicted_at(kube.pod("small")["status"]) > evicted_at(gone)
        finally:
            kube.kubelet.stop()
            kube.configure_kubelet(evictionSoft={}, evictionSoftGracePeriod={})
            kube.start_kubelet()
        assert gone["reason"] == "Evicted"
        assert "Container main was using" in gone["message"]
        assert "request is 64Mi" in gone["message"]


def evicted_at(status: Any) -> str:
    """A time stamp; the latest of all where that has not happened."""
    times = (each["lastTransitionTime"] for each in status["conditions"] if each["type"] == "DisruptionTarget")
    return next(times, "9999")


def working_set(kube: Cluster, name: str) -> int:
    """Bytes that the kubelet counts for the pod's containers."""
    pods = [pod for pod in kube.stats()["pods"] if pod["podRef"]["name"] == name]
    return sum(each.get("memory", {}).get("workingSetBytes", 0) for pod in pods for each in pod.get("containers", ()))


def test_after_a_reboot_nothing_is_left_and_pods_come_back(kube: Cluster) -> None:
    comes_back = manifest("comes-back", container(SLEEP), restartPolicy="Always")
    kube.create("pods", comes_back)
    kube.create("pods", manifest("once", container(SLEEP)))
    try:
        for name in ("comes-back", "once"):
            kube.phase(name, "Running")
        before = kube.cri.sandboxes()
        assert len(vmms()) == len(before) == 2

        reboot(kube)

        eventually(
            lambda: restarts(kube, "comes-back") == 1 and kube.pod("comes-back")["status"]["phase"] == "Running",
            what=lambda: f"the pod runs again: {kube.pod('comes-back')['status']}; {kube.events('comes-back')}",
            within_s=250,
            every_s=0.3,
        )
        assert kube.phase("once", "Failed")["status"]["containerStatuses"][0]["state"]["terminated"]
        (vmm,) = vmms()
        assert not any(sandbox in " ".join(vmm.command) for sandbox in before)
        left = [path for root in ("/run/vc", "/run/kata-containers", "/run/pyshim") for path in below(Path(root))]
        assert not [path for path in left if any(sandbox in path for sandbox in before)]
    finally:
        kube.delete("comes-back", 1)
        kube.delete("once", 0)


def condition_of(status: Any, kind: str) -> str:
    return next((each.get("message", "") for each in status["conditions"] if each["type"] == kind), "")


def restarts(kube: Cluster, name: str) -> int:
    statuses = kube.pod(name)["status"].get("containerStatuses") or [{"restartCount": 0}]
    return int(statuses[0]["restartCount"])


def below(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*")]


def reboot(kube: Cluster) -> None:
    """Every process of the node's, but for the control plane, has lost its life at once, and /run, cgroups and links
    are as after a boot. containerd and the kubelet have been started again.
    """
    daemon = kube.cri.daemon
    sandboxes = kube.cri.sandboxes()
    kube.cri.close()
    kube.kubelet.stop(signal.SIGKILL)
    daemon.stop(signal.SIGKILL)
    lost = [each for each in processes.running() if any(id in word for id in sandboxes for word in each.command)]
    for process in lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not any(processes.is_alive(each.pid) for each in lost), what="all processes are dead")
    zygote.let_come()
    while mounts := mounts_of_pods():  # one by one: those of a peer group go together
        subprocess.run(["umount", "--lazy", mounts[-1]], check=True)
    for path in Path("/run").iterdir():
        if path not in (GROUND.parent, Path("/run/lock")):
            shutil.rmtree(path)
    remove_pods_cgroups()
    subprocess.run(["ip", "link", "delete", cri_session.BRIDGE], check=True)
    subprocess.run(["ip", "link", "add", cri_session.BRIDGE, "type", "bridge"], check=True)
    cri_session.make_furniture(daemon.directories.state)
    daemon.start()
    kube.cri.connect()
    kube.start_kubelet()


def mounts_of_pods() -> list[str]:
    """A boot would find none of them."""
    found = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    ours = [path for path in found if path.startswith(("/run/", "/var/lib/kubelet/"))]
    return [path for path in ours if not path.startswith(str(GROUND.parent))]


def remove_pods_cgroups() -> None:
    for _name, root in cgroup_roots():
        for directory, _, _ in os.walk(root / "kubepods", topdown=False):
            path = Path(directory)
            if path.name not in ("kubepods", "besteffort", "burstable"):
                eventually(partial(removed, path), what=f"no process is in {path}")


def removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
