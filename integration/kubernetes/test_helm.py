"""The chart from `helm install` to `helm uninstall`, on a node where nothing of pyshim was: nothing is played.

Kubernetes' own controllers and scheduler make pods of the DaemonSet and the Job, the kubelet runs them with runc from
the image of configs/helm/Dockerfile, and the agent in them installs on the node, which here is the enclosure.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.framework import processes, releases
from integration.framework.bare_node import everything
from integration.framework.cgroups import SandboxCgroups
from integration.framework.cri_session import NRI_SOCKET
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
_PODS = "/api/v1/namespaces/default/pods"
_INSTANCE = "labelSelector=app.kubernetes.io/instance=pyshim"
_KINDS = (
    *("/api/v1/pods", "/api/v1/configmaps", "/api/v1/secrets", "/api/v1/serviceaccounts", "/api/v1/services"),
    *("/apis/apps/v1/daemonsets", "/apis/apps/v1/deployments", "/apis/batch/v1/jobs"),
    *("/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
    *("/apis/node.k8s.io/v1/runtimeclasses", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"),
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
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
    """pyshim's marks of the node: its labels or annotations, without the prefix."""
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
    """The output of the installed operator's command on the node."""
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


_CPUS = frozenset(os.sched_getaffinity(0))
_DROP_IN = Path("/etc/pyshim/config.d/50-own.toml")
"""Of the node's operator: as many vCPUs as the pod has CPUs, so that each can have its own."""


@pytest.mark.skipif(
    not releases.chosen().has_nri, reason=f"containerd {releases.chosen().generation} has no NRI (CONTAINERD=2.3)"
)
@pytest.mark.skipif(len(_CPUS) < 2, reason="needs two CPUs: one stays shared")
@pytest.mark.timeout(2400)
def test_the_plugin_of_the_chart_places_vms(kube: Cluster, images: None) -> None:
    """Its pod is made by the DaemonSet; containers beside the VM follow, also after another pod took its place."""
    release, before, reserved = Release(), everything(), min(_CPUS)
    values = ["nri.enabled=true", f"nri.socket={NRI_SOCKET}", f"nri.reservedCpus={reserved}"]
    release.run(
        "install", image.FIRST, "--create-namespace", "--set=removal.timeout=550", *(f"--set={v}" for v in values)
    )
    until(kube, lambda: is_ready(kube), "the node is ready")
    until(kube, lambda: len(plugins(kube)) == 1, "the plugin is ready")
    _DROP_IN.parent.mkdir()
    _DROP_IN.write_text("[hypervisor.qemu]\noverhead_vcpus = 0\n[runtime]\nstatic_sandbox_resource_mgmt = true\n")
    whole = {"cpu": "1", "memory": "64Mi"}

    with kube.running("beside", container(SLEEP), runtimeClassName=None):
        kube.phase("beside", "Running")
        assert cpus_of(kube, "beside") == _CPUS
        with kube.running("own", container(SLEEP, resources={"limits": whole, "requests": whole})):
            made = kube.phase("own", "Running")
            record = SandboxCgroups(sandbox_of(kube, "own")).record
            placement = record["Placed"]["placement"]
            (taken,) = placement["vcpu_cpus"]
            assert (placement["exclusive"], taken != reserved) == (True, True)
            assert [os.sched_getaffinity(tid) for tid in record["VcpuThreads"]] == [{taken}]
            left = _CPUS - {taken}
            eventually(lambda: cpus_of(kube, "beside") == left, what=lambda: f"it leaves a CPU: {agents(kube)}")

            (first,) = plugins(kube)
            kube.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{first}")
            until(kube, lambda: bool(plugins(kube) - {first}), "another plugin is ready")
            with kube.running("late", container(SLEEP), runtimeClassName=None):
                kube.phase("late", "Running")
                eventually(lambda: cpus_of(kube, "late") == left, what=lambda: f"it is told: {agents(kube)}")
            assert cpus_of(kube, "beside") == left
            assert kube.pod("own")["status"]["containerStatuses"] == made["status"]["containerStatuses"]
        eventually(lambda: cpus_of(kube, "beside") == _CPUS, what=lambda: f"it has all again: {agents(kube)}")

    _DROP_IN.unlink()
    _DROP_IN.parent.rmdir()
    kube.remove_ended_sandboxes()
    ended(release.start("uninstall", "--timeout=10m"))
    assert everything() == before
    until(kube, lambda: all_of_the_release(kube) == [], "nothing is in the cluster")
    kube.remove_ended_sandboxes()
    assert not Path("/run/pyshim/nri/placement.sock").exists()


@pytest.mark.timeout(2400)
def test_the_api_server_calls_the_webhook_of_the_chart(kube: Cluster, images: None) -> None:
    """At the pods of its Deployment, by the Service and with the certificate that the chart made."""
    release, before = Release(), everything()
    words = ("--set=removal.timeout=550", "--set=webhook.enabled=true")
    denied = manifest("denied", container("true"), hostNetwork=True)
    asks = {"requests": {"cpu": "500m", "memory": "700Mi"}}
    sized = manifest("sized", container("true", resources=asks))

    release.run("install", image.FIRST, "--create-namespace", *words)
    until(kube, lambda: is_ready(kube) and webhook_has(kube, 2), "node and webhook are ready")
    until(kube, lambda: "hostNetwork" in refusal(kube, denied), "the webhook is called")
    made = kube.call("POST", f"{_PODS}?dryRun=All", sized)["metadata"]["annotations"]
    assert int(made["io.katacontainers.config.hypervisor.requested_memory"]) == 700

    certificate = certificate_of(kube)
    release.run("upgrade", image.FIRST, *words, "--set=webhook.replicas=1", "--set=webhook.options={--node-cpus,64}")
    until(kube, lambda: webhook_has(kube, 1), "the upgrade of the webhook is there")
    assert certificate_of(kube) == certificate, "authority and certificate stay a pair"
    assert "hostNetwork" in refusal(kube, denied)

    ended(release.start("uninstall", "--timeout=10m"))
    until(kube, lambda: all_of_the_release(kube) == [], "nothing is in the cluster")
    kube.remove_ended_sandboxes()
    assert everything() == before
    assert "hostNetwork" not in refusal(kube, denied), "nobody calls it any more"


_OWN_CLASSES = """
classes:
  small:
    base: pykata
    overhead: {{cpu: 250m, memory: 320Mi}}
    dropIn: |
      [hypervisor.qemu]
      default_memory = {mib}
  large:
    base: pykata
    overhead: {{cpu: 250m, memory: 320Mi}}
    dropIn: |
      [hypervisor.qemu]
      default_memory = 700
"""


@pytest.mark.timeout(2400)
def test_own_classes_and_a_changed_configuration(kube: Cluster, images: None) -> None:
    """A class's settings are on the node, a change of them is rolled out, and `helm test` runs a pod in a VM."""
    release, before, values = Release(), everything(), GROUND / "values.yaml"
    words = ("--set=removal.timeout=550", f"--values={values}")
    handlers = {"pykata": "true", "small": "true", "large": "true"}

    values.write_text(_OWN_CLASSES.format(mib=300))
    release.run("install", image.FIRST, "--create-namespace", *words)
    until(kube, lambda: is_ready(kube) and handlers.items() <= of_node(kube, "labels").items(), "all classes are ready")
    assert memory_mib(kube, "small-1", "small") <= 300 < memory_mib(kube, "large-1", "large") <= 700

    values.write_text(_OWN_CLASSES.format(mib=450))
    release.run("upgrade", image.FIRST, *words)
    settings = Path("/etc/pyshim/classes/small/config.d/10-install.toml")
    until(kube, lambda: is_ready(kube) and "450" in settings.read_text(), "the change is rolled out")
    assert 300 < memory_mib(kube, "small-2", "small") <= 450
    ended(release.start("test", "--timeout=5m"))

    ended(release.start("uninstall", "--timeout=10m"))
    until(kube, lambda: all_of_the_release(kube) == [], "nothing is in the cluster")
    kube.remove_ended_sandboxes()
    assert everything() == before


def memory_mib(kube: Cluster, name: str, runtime_class: str) -> float:
    """Of the guest in which a pod of the class, without limits, has run."""
    script = container("awk '/MemTotal/ {print $2}' /proc/meminfo")
    kube.create("pods", manifest(name, script, nodeName=None, runtimeClassName=runtime_class))
    kube.phase(name, "Succeeded")
    found = int(kube.log(name)) / 1024
    kube.delete(name, 0)
    return found


def refusal(kube: Cluster, pod: dict[str, Any]) -> str:
    """Why the API server would not take the pod; empty when it would."""
    try:
        kube.call("POST", f"{_PODS}?dryRun=All", pod)
    except Refused as error:
        return str(error)
    return ""


def certificate_of(kube: Cluster) -> dict[str, str]:
    found: dict[str, str] = kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/pyshim-webhook")["data"]
    return found


def webhook_has(kube: Cluster, replicas: int) -> bool:
    """So many pods of the Deployment's newest form, ready, and none beside them."""
    found = kube.call("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pyshim-webhook")
    counts = [found["status"].get(name) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    seen = found["status"].get("observedGeneration")
    return bool(seen == found["metadata"]["generation"] and counts == [replicas] * 3)


def plugins(kube: Cluster) -> set[str]:
    """The pods of the plugin that are ready, and not on their way out."""
    query = "labelSelector=app.kubernetes.io/name=pyshim-nri"
    return {
        each["metadata"]["name"]
        for each in kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?{query}")["items"]
        if "deletionTimestamp" not in each["metadata"]
        and {"type": "Ready", "status": "True"}.items()
        <= next((at for at in each["status"].get("conditions", ()) if at["type"] == "Ready"), {}).items()
    }


def sandbox_of(kube: Cluster, pod: str) -> str:
    (found,) = (each.id for each in kube.cri.call("ListPodSandbox").items if each.metadata.name == pod)
    return str(found)


def cpus_of(kube: Cluster, pod: str) -> frozenset[int]:
    """Those on which the one container of a pod of runc's may run."""
    (found,) = (
        each.id for each in kube.cri.call("ListContainers").containers if each.labels["io.kubernetes.pod.name"] == pod
    )
    info = kube.cri.call("ContainerStatus", container_id=found, verbose=True).info["info"]
    return frozenset(os.sched_getaffinity(json.loads(info)["pid"]))


def vmm_of(kube: Cluster, pod: str) -> str:
    """The command line of the shim and of QEMU of a running pod."""
    return "\n".join(str(each) for each in processes.find(sandbox_of(kube, pod)))
