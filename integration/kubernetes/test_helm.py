"""The chart from `helm install` to `helm uninstall`, on a node where nothing of pyshim was: nothing is played.

Kubernetes' own controllers and scheduler make pods of the DaemonSet and the Job, the kubelet runs them with runc from
the image of configs/helm/Dockerfile, and the agent in them installs on the node, which here is the enclosure.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.framework import processes
from integration.framework.bare_node import everything
from integration.framework.waiting import eventually

from . import helm, image
from .cluster import GROUND, NODE, START_UP_TAINT, Cluster, Refused, bare_cluster, container, manifest

pytestmark = [
    pytest.mark.vm,
    pytest.mark.parametrize("kube", [bare_cluster], indirect=True, scope="session", ids=["bare"]),
]

NAMESPACE = "pyshim-system"
SLEEP = "exec sleep 100000"
WITHIN_S = 600.0
"""An installation makes virtual environments and runs two test pods."""
_INSTANCE = "labelSelector=app.kubernetes.io/instance=pyshim"
_KINDS = (
    *("/api/v1/pods", "/api/v1/configmaps", "/api/v1/secrets", "/api/v1/serviceaccounts", "/api/v1/services"),
    *("/apis/apps/v1/daemonsets", "/apis/apps/v1/deployments", "/apis/batch/v1/jobs"),
    *("/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
    *("/apis/node.k8s.io/v1/runtimeclasses", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"),
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
)


class Release:
    """The chart's release, as an administrator's helm has it."""

    def __init__(self) -> None:
        program = helm.find()
        assert program is not None, "helm is missing (hint: .venv/bin/python -m integration.kubernetes.helm)"
        self._program = program
        self._environment = {"HOME": str(GROUND / "helm"), "PATH": os.defpath, "KUBECONFIG": str(GROUND / "kubeconfig")}

    def start(self, verb: str, *words: str) -> subprocess.Popen[str]:
        command = [self._program, verb, "pyshim", *words, f"--namespace={NAMESPACE}"]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, verb: str, tag: str, *words: str) -> None:
        values = [f"--set=image.repository={image.REPOSITORY},image.tag={tag},image.pullPolicy=Never"]
        ended(self.start(verb, str(helm.CHART), *values, *words))


def ended(started: subprocess.Popen[str]) -> None:
    said, _ = started.communicate(timeout=WITHIN_S)
    assert started.returncode == 0, said


@pytest.fixture(scope="module")
def images(kube: Cluster) -> None:
    for tag in (image.FIRST, image.SECOND):
        kube.cri.daemon.ctr("--namespace", "k8s.io", "images", "import", image.archive(tag))


def of_node(kube: Cluster, kind: str) -> dict[str, str]:
    """What pyshim says of the node: its labels or annotations, without the prefix."""
    found = kube.node()["metadata"].get(kind, {})
    return {key.removeprefix("pyshim.io/"): text for key, text in found.items() if key.startswith("pyshim.io/")}


def taints(node: Any) -> set[str]:
    """But for what Kubernetes says of its state: while containerd is restarted the node is not ready."""
    keys = {each["key"] for each in node["spec"].get("taints", ())}
    return {key for key in keys if not key.startswith("node.kubernetes.io/")}


def steps(kube: Cluster, since: str) -> Iterator[tuple[dict[str, str], set[str]]]:
    """Labels of ours and taints of the node, after each change since that version of it."""
    for node in kube.watch(f"/api/v1/nodes?fieldSelector=metadata.name={NODE}&", since):
        labels = {key: text for key, text in node["metadata"]["labels"].items() if key.startswith("pyshim.io/")}
        yield labels, taints(node)


def agents(kube: Cluster) -> str:
    """For a failure: what the agents' pods are and say."""
    said = []
    for pod in kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]:
        name = pod["metadata"]["name"]
        try:
            log = kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/log?tailLines=30")
        except Refused as error:
            log = str(error)
        said.append(f"{name}: {json.dumps(pod['status'])}\n{log}")
    said += [each["message"] for each in kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]]
    return "\n".join((str(of_node(kube, "labels")), str(of_node(kube, "annotations")), *said))


def until(kube: Cluster, look: Callable[[], bool], what: str) -> None:
    eventually(look, what=lambda: f"{what}: {agents(kube)}", within_s=WITHIN_S, every_s=1)


def is_ready(kube: Cluster) -> bool:
    """The agent's pod says so, too: a roll-out waits for that."""
    counts = kube.call("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/pyshim-node")["status"]
    rolled_out = counts.get("updatedNumberScheduled") == counts.get("numberReady") == 1
    return rolled_out and of_node(kube, "labels").get("state") == "ready"


def pykata(name: str, script: str) -> dict[str, Any]:
    """A pod for which the scheduler finds the node."""
    return manifest(name, container(script), nodeName=None)


def pyshim(*words: str) -> str:
    """What the operator's command, as it is installed, prints on the node."""
    command = ["/usr/local/bin/pyshim", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def all_of_the_release(kube: Cluster) -> list[str]:
    found = [
        (kind, each["metadata"]["name"]) for kind in _KINDS for each in kube.call("GET", f"{kind}?{_INSTANCE}")["items"]
    ]
    return [f"{kind} {name}" for kind, name in found]


@pytest.mark.timeout(2400)
def test_install_upgrade_and_uninstall(kube: Cluster, images: None) -> None:
    release = Release()
    node = kube.node()
    before, version = everything(), node["metadata"]["resourceVersion"]
    assert START_UP_TAINT in taints(node)

    release.run("install", image.FIRST, "--create-namespace", "--set=removal.timeout=550")
    until(kube, lambda: is_ready(kube), "the node is ready")
    changes = list(steps(kube, version))
    states = [labels.get("pyshim.io/state") for labels, _taints in changes if labels]
    assert states[0] == "installing"
    # A label comes when all is installed, the taint goes after everything.
    assert all(START_UP_TAINT in left for labels, left in changes if labels.get("pyshim.io/state") != "ready")
    assert changes[-1] == ({"pyshim.io/state": "ready", "pyshim.io/pykata": "true"}, set())
    first_ready = states.index("ready")
    assert START_UP_TAINT in [left for labels, left in changes if labels][first_ready]
    assert "pyshim-verify" in kube.cri.daemon.shim_log()
    # The chart's overhead is for nodes with KVM; the node's own check says what this one needs.
    overhead = json.loads(pyshim("sizing", "podfixed", "--json"))["pod_fixed"]
    fits = overhead == {"cpu": "250m", "memory": "320Mi"}
    assert (f"memory: {overhead['memory']}" in of_node(kube, "annotations").get("message", "")) != fits
    first = of_node(kube, "annotations")["release"]
    status = json.loads(
        subprocess.run(["/usr/local/bin/pyshim", "status", "--json"], check=True, capture_output=True).stdout
    )
    assert (status["release"], set(status["files"].values())) == (first, {"ok"})

    made = kube.create("pods", pykata("stays", SLEEP))
    assert made["spec"]["overhead"] == {"cpu": "250m", "memory": "320Mi"}
    stays = kube.phase("stays", "Running")
    assert stays["spec"]["nodeName"] == NODE
    assert f"pyshim/releases/{first}/" in vmm_of(kube, "stays")

    computed = [f"--set=classes.pykata.overhead.{name}={text}" for name, text in overhead.items()]
    release.run("upgrade", image.SECOND, "--set=removal.timeout=550", *computed)
    until(kube, lambda: is_ready(kube) and of_node(kube, "annotations")["release"] != first, "the upgrade is there")
    assert of_node(kube, "annotations")["older-pods"] == "default/stays"
    assert kube.pod("stays")["status"]["containerStatuses"] == stays["status"]["containerStatuses"]
    assert f"pyshim/releases/{first}/" in vmm_of(kube, "stays")
    assert "message" not in of_node(kube, "annotations"), "class and configuration of the node fit"
    made = kube.create("pods", pykata("newer", "cat /proc/version"))
    assert made["spec"]["overhead"] == overhead
    kube.phase("newer", "Succeeded")
    assert "Linux version" in kube.log("newer")
    kube.delete("newer", 0)

    removal = release.start("uninstall", "--timeout=10m")
    until(
        kube,
        lambda: of_node(kube, "annotations").get("message") == "waits for the end of pods default/stays",
        "the removal waits for the pod",
    )
    assert of_node(kube, "labels") == {"state": "removing"}
    assert kube.pod("stays")["status"]["phase"] == "Running"
    kube.delete("stays", 1)
    kube.remove_ended_sandboxes()
    ended(removal)
    assert everything() == before
    assert (of_node(kube, "labels"), of_node(kube, "annotations"), taints(kube.node())) == ({}, {}, set())
    until(kube, lambda: all_of_the_release(kube) == [], "nothing is in the cluster")


def vmm_of(kube: Cluster, pod: str) -> str:
    """The command line of the shim and of QEMU of a running pod."""
    (sandbox,) = (each.id for each in kube.cri.call("ListPodSandbox").items if each.metadata.name == pod)
    return "\n".join(str(each) for each in processes.find(sandbox))
