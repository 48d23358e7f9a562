"""A pod's failure has the event that docs/KUBERNETES.md names: each row of its table is produced here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from integration.framework import cri_session, shim_config
from integration.framework.runtime import Runtime
from integration.framework.waiting import eventually

from . import peers
from .cluster import Cluster, Refused, container, manifest
from .troubleshooting import Row, rows

pytestmark = pytest.mark.vm

SLEEP = "exec sleep 100000"
_MERGE = "application/strategic-merge-patch+json"


def annotated(name: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    pod = manifest(name, container(SLEEP))
    pod["metadata"]["annotations"] = dict(annotations)
    return pod


def limited(name: str, cpu: str, memory: str) -> dict[str, Any]:
    return manifest(name, container(SLEEP, resources={"limits": {"cpu": cpu, "memory": memory}}))


@contextlib.contextmanager
def created(kube: Cluster, pod: dict[str, Any]) -> Iterator[str]:
    name: str = pod["metadata"]["name"]
    kube.create("pods", pod)
    try:
        yield name
    finally:
        kube.delete(name, 1)


@contextlib.contextmanager
def without_handler(kube: Cluster) -> Iterator[str]:
    with kube.runtime_class("elsewhere", "pykata-elsewhere"):
        pod = manifest("no-handler", container(SLEEP), runtimeClassName="elsewhere")
        with created(kube, pod) as name:
            yield name


@contextlib.contextmanager
def without_overhead(kube: Cluster) -> Iterator[str]:
    """The pod's memory is its container's limit."""
    with kube.runtime_class("no-overhead", "pykata"):
        pod = limited("cramped", "100m", "64Mi")
        pod["spec"]["runtimeClassName"] = "no-overhead"
        with created(kube, pod) as name:
            yield name


@contextlib.contextmanager
def configured(kube: Cluster, keys: shim_config.Keys, **overhead: str) -> Iterator[None]:
    """The class `configured`, with the handler of the tests for remote VMs.

    Its VMs have the shipped configuration with `keys` in the hypervisor's table.
    """
    directory = cri_session.REMOTE_CONFIG.parent
    shim_config.with_keys(directory, hypervisor=keys)
    try:
        with kube.runtime_class("configured", cri_session.REMOTE_HANDLER, **overhead):
            yield
    finally:
        cri_session.REMOTE_CONFIG.unlink()
        shutil.rmtree(directory / "config.d")


@contextlib.contextmanager
def without_guest(kube: Cluster) -> Iterator[str]:
    pod = manifest("no-guest", container(SLEEP), runtimeClassName="configured")
    with configured(kube, {"kernel": "/opt/pyshim/no-such-kernel"}), created(kube, pod) as name:
        yield name


@contextlib.contextmanager
def with_a_lost_vm(kube: Cluster) -> Iterator[str]:
    with created(kube, manifest("lost", container(SLEEP), restartPolicy="Always")) as name:
        kube.phase(name, "Running")
        sandbox = next(each.id for each in kube.cri.call("ListPodSandbox").items if each.metadata.name == name)
        for process in Runtime.chosen().vmms(sandbox):
            os.kill(process.pid, signal.SIGKILL)
        yield name


def resized(memory: str, cpu: str = "100m") -> Callable[[Cluster], contextlib.AbstractContextManager[str]]:
    """A running pod whose container asks for more than its VM, or its node, has."""

    @contextlib.contextmanager
    def scene(kube: Cluster) -> Iterator[str]:
        with created(kube, limited("resized", "100m", "64Mi")) as name:
            kube.phase(name, "Running")
            resize(kube, name, cpu, memory)
            yield name

    return scene


def resize(kube: Cluster, pod: str, cpu: str, memory: str) -> None:
    both = {"cpu": cpu, "memory": memory}
    patch = {"spec": {"containers": [{"name": "main", "resources": {"limits": both, "requests": both}}]}}
    kube.call("PATCH", f"/api/v1/namespaces/default/pods/{pod}/resize", patch, _MERGE)


@contextlib.contextmanager
def shrunk(kube: Cluster, runtime_class: str = "pykata") -> Iterator[str]:
    """A pod that had much memory and gave it back in its VM; then its limit is lowered to what it may need."""
    pod = limited("shrunk", "100m", "512Mi")
    had = "dd if=/dev/zero of=/dev/null bs=400M count=1 2>&1; echo done; exec sleep 100000"
    pod["spec"]["containers"][0]["command"] = ["sh", "-c", had]
    pod["spec"]["runtimeClassName"] = runtime_class
    with created(kube, pod) as name:
        kube.phase(name, "Running")
        eventually(lambda: "done" in kube.log(name), what=lambda: f"the memory was used: {kube.log(name)}")
        # The kubelet compares the limit with its latest figure, which is several seconds old.
        before = figure_time(kube, name)
        eventually(lambda: figure_time(kube, name) > before, what="the kubelet has a newer figure")
        resize(kube, name, "100m", "256Mi")
        yield name


def figure_time(kube: Cluster, pod: str) -> str:
    """When the kubelet's figure of the pod's memory was taken."""
    return str(next(each["memory"]["time"] for each in kube.stats()["pods"] if each["podRef"]["name"] == pod))


TOO_MUCH = "16Ti"
NO_CAPACITY = "enough capacity"
REFUSED_AT_ONCE = peers.MINOR >= 37
"""The API server looks at the node before it takes a resize."""
Scene = Callable[[Cluster], contextlib.AbstractContextManager[str]]
_MOUNTED: dict[str, Any] = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
_NO_MAP = {"volumes": [{"name": "v", "configMap": {"name": "no-such-map"}}]}
SCENES: dict[str, Scene] = {
    "hostNetwork is true": lambda kube: created(kube, manifest("host-net", container(SLEEP), hostNetwork=True)),
    "refuse annotation": lambda kube: created(
        kube, annotated("annotated", {"io.katacontainers.config.hypervisor.kernel": "/x"})
    ),
    "no runtime for": without_handler,
    "do not fit on this host": lambda kube: created(
        kube, annotated("too-large", {"io.katacontainers.config.hypervisor.default_memory": str(16 << 20)})
    ),
    "OOM killer ended the VMM": without_overhead,
    "open kernel": without_guest,
    "user namespaces": lambda kube: created(kube, manifest("users", container(SLEEP), hostUsers=False)),
    "configmap": lambda kube: created(kube, manifest("mapless", container(SLEEP, **_MOUNTED), **_NO_MAP)),
    "resource: cpu": lambda kube: created(kube, limited("many-cpus", "640", "64Mi")),
    "resource: memory": lambda kube: created(kube, limited("much-memory", "100m", "16Ti")),
    "was not found": lambda kube: created(kube, manifest("programless", container("", command=["/no/such"]))),
    "Pod sandbox changed": with_a_lost_vm,
    "keeps its size": resized("2Gi"),
    NO_CAPACITY: resized(TOO_MUCH),
    "below current usage": shrunk,
}
"""By a part of the text of one row."""


def scene_of(row: Row) -> Scene:
    (found,) = (scene for part, scene in SCENES.items() if part in row.text)
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.reason}-{row.text[:24]}")
def test_a_row_of_the_page_is_what_kubernetes_says(kube: Cluster, row: Row) -> None:
    if REFUSED_AT_ONCE and NO_CAPACITY in row.text:
        pytest.skip("Kubernetes 1.37 has no such condition: the next test")
    with scene_of(row)(kube) as pod:
        eventually(
            lambda: any(said(kube, pod, row)),
            what=lambda: f"{row}; events {kube.events(pod)}, status {kube.pod(pod)['status']}",
            within_s=120,
            every_s=0.3,
        )


@pytest.mark.skipif(not REFUSED_AT_ONCE, reason="Kubernetes before 1.37 takes the request: a row of the page")
def test_the_api_server_refuses_a_resize_that_the_node_has_no_room_for(kube: Cluster) -> None:
    with pytest.raises(Refused, match="didn't have enough allocatable resources: memory"), resized(TOO_MUCH)(kube):
        pass


def test_a_limit_can_be_lowered_once_the_guest_has_given_its_free_memory_back(kube: Cluster) -> None:
    overhead = {"memory": "320Mi", "cpu": "250m"}
    with configured(kube, {"reclaim_guest_freed_memory": True}, **overhead), shrunk(kube, "configured") as pod:
        eventually(
            lambda: kube.pod(pod)["status"]["containerStatuses"][0]["resources"]["limits"]["memory"] == "256Mi",
            what=lambda: f"the limit is lowered: {kube.pod(pod)['status']}",
        )


def said(kube: Cluster, pod: str, row: Row) -> Iterator[bool]:
    if row.detail:
        for each in kube.pod(pod)["status"].get("conditions", ()):
            yield (each["type"], each.get("reason")) == (row.reason, row.detail) and row.fits(each.get("message", ""))
    else:
        for reason, message in kube.events(pod):
            yield reason == row.reason and row.fits(message)
