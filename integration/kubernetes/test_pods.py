"""Pods of many kinds through a real kubelet, and what each must come to."""

from __future__ import annotations

import gzip
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from integration.framework.waiting import eventually
from pyshim.model.units import MIB

from . import peers
from .cluster import ADDRESS, NODE, Cluster, Refused, container, manifest

pytestmark = pytest.mark.vm

SLEEP = "exec sleep 100000"


def limits(cpu: str, memory: str) -> dict[str, Any]:
    return {"resources": {"limits": {"cpu": cpu, "memory": memory}}}


def status(pod: Any, name: str = "main", kind: str = "containerStatuses") -> Any:
    return next(each for each in pod["status"][kind] if each["name"] == name)


def is_ready(pod: Any) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def ready(kube: Cluster, name: str) -> Any:
    kube.phase(name, "Running")

    def look() -> Any:
        found = kube.pod(name)
        return found if is_ready(found) else None

    return eventually(look, what=lambda: f"pod {name} is ready: {kube.pod(name)['status']}", every_s=0.3)


ENDS = {
    "exit-0": (container("echo done"), "Succeeded", {"exitCode": 0, "reason": "Completed"}),
    "exit-7": (container("exit 7"), "Failed", {"exitCode": 7, "reason": "Error"}),
    "no-program": (container("", command=["/no/such"]), "Failed", {"exitCode": 128, "reason": "StartError"}),
    "out-of-memory": (
        container("tail /dev/zero", **limits("500m", "64Mi")),
        "Failed",
        {"exitCode": 137, "reason": "OOMKilled"},
    ),
    "message": (
        container("echo because >/dev/termination-log; exit 3"),
        "Failed",
        {"exitCode": 3, "message": "because\n"},
    ),
}


@pytest.mark.parametrize("name", list(ENDS))
def test_a_pods_end_is_what_kubernetes_users_expect(kube: Cluster, name: str) -> None:
    spec, phase, terminated = ENDS[name]
    with kube.running(name, spec):
        pod = kube.phase(name, "Succeeded", "Failed")

    found = status(pod)["state"]["terminated"]
    assert (pod["status"]["phase"], {key: found.get(key) for key in terminated}) == (phase, terminated)


def test_volumes_environment_and_identity(kube: Cluster) -> None:
    kube.create("configmaps", {"metadata": {"name": "words"}, "data": {"key": "from-map"}})
    kube.create("secrets", {"metadata": {"name": "hidden"}, "stringData": {"key": "from-secret"}})
    mounts = [
        {"name": name, "mountPath": f"/v/{name}"} for name in ("words", "hidden", "both", "labels", "disk", "memory")
    ]
    script = (
        "cat /v/words/key /v/hidden/key /v/both/a /v/both/b /v/labels/app; echo; echo $FROM_MAP $NODE; id -u; id -G; "
        "touch /v/disk/x /v/memory/x && stat -c %g /v/disk/x; stat -f -c %T /v/memory; "
        "touch /x 2>/dev/null || echo read-only"
    )
    main = container(
        script,
        volumeMounts=mounts,
        env=[
            {"name": "FROM_MAP", "valueFrom": {"configMapKeyRef": {"name": "words", "key": "key"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        securityContext={"readOnlyRootFilesystem": True},
    )
    projected = [
        {"configMap": {"name": "words", "items": [{"key": "key", "path": "a"}]}},
        {"secret": {"name": "hidden", "items": [{"key": "key", "path": "b"}]}},
    ]
    volumes = [
        {"name": "words", "configMap": {"name": "words"}},
        {"name": "hidden", "secret": {"secretName": "hidden"}},
        {"name": "both", "projected": {"sources": projected}},
        {
            "name": "labels",
            "downwardAPI": {"items": [{"path": "app", "fieldRef": {"fieldPath": "metadata.labels['app']"}}]},
        },
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]
    security = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 3000, "supplementalGroups": [4000]}
    try:
        with kube.running("kinds", main, volumes=volumes, securityContext=security):
            pod = kube.phase("kinds", "Succeeded", "Failed")
            lines = kube.log("kinds").splitlines()
    finally:
        kube.call("DELETE", "/api/v1/namespaces/default/configmaps/words")
        kube.call("DELETE", "/api/v1/namespaces/default/secrets/hidden")

    assert pod["status"]["phase"] == "Succeeded", lines
    assert lines[0] == "from-mapfrom-secretfrom-mapfrom-secretkinds"
    assert lines[1:3] == ["from-map node1", "1000"]
    # 50 is a group of that user in the image's /etc/group: supplementalGroupsPolicy is Merge by default.
    assert set(lines[3].split()) == {"1000", "3000", "4000", "50"}
    assert lines[4:] == ["3000", "tmpfs", "read-only"]


def test_init_containers_sidecars_and_shared_volumes(kube: Cluster) -> None:
    shared: dict[str, Any] = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    inits = [
        container("echo first >/shared/order", "first", **shared),
        container(
            "echo sidecar >>/shared/order; touch /shared/up; trap 'exit 0' TERM; sleep 100000 & wait",
            "sidecar",
            restartPolicy="Always",
            startupProbe={"exec": {"command": ["test", "-e", "/shared/up"]}, "periodSeconds": 1},
            **shared,
        ),
    ]
    main = container("cat /shared/order", **shared)
    with kube.running("ordered", main, initContainers=inits, volumes=[{"name": "shared", "emptyDir": {}}]):
        pod = kube.phase("ordered", "Succeeded", "Failed")
        assert kube.log("ordered") == "first\nsidecar\n"

    assert pod["status"]["phase"] == "Succeeded"
    assert status(pod, "first", "initContainerStatuses")["state"]["terminated"]["exitCode"] == 0


def test_a_pods_life(kube: Cluster) -> None:
    """Probes, hooks, restarts, statistics, a resize and a debug container, in one VM."""
    main = container(
        "trap 'exit 0' TERM; while :; do sleep 0.2; done",
        readinessProbe={"exec": {"command": ["test", "-e", "/tmp/started"]}, "periodSeconds": 1},
        lifecycle={"postStart": {"exec": {"command": ["touch", "/tmp/started"]}}},
        resources={"requests": {"cpu": "250m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}},
    )
    failing = container(
        SLEEP,
        "failing",
        livenessProbe={
            "exec": {"command": ["test", "!", "-e", "/proc/self/exe"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
        terminationGracePeriodSeconds=1,
    )
    failing.pop("terminationGracePeriodSeconds")
    with kube.running("life", main, failing, restartPolicy="Always"):
        kube.phase("life", "Running")
        eventually(lambda: status(kube.pod("life"))["ready"], what="the main container is ready")
        eventually(
            lambda: status(kube.pod("life"), "failing")["restartCount"] >= 1,
            what=lambda: f"the container whose probe fails is restarted: {kube.events('life')}",
        )
        assert "Liveness probe failed" in kube.event("life", "Unhealthy")

        eventually(lambda: _memory_of(kube, "life") > 64 << 20, what="the summary has the memory of the pod's VM")

        resized = {"resources": {"limits": {"cpu": "300m", "memory": "128Mi"}, "requests": {"cpu": "200m"}}}
        patch = {"spec": {"containers": [{"name": "main", **resized}]}}
        kube.call(
            "PATCH", "/api/v1/namespaces/default/pods/life/resize", patch, "application/strategic-merge-patch+json"
        )
        eventually(
            lambda: status(kube.pod("life"))["resources"]["limits"]["cpu"] == "300m",
            what=lambda: f"the container is resized: {kube.pod('life')['status']}",
        )
        assert status(kube.pod("life"))["restartCount"] == 0

        debug = container("ps", "debug", resources=None)
        patch = {"spec": {"ephemeralContainers": [debug]}}
        kube.call(
            "PATCH",
            "/api/v1/namespaces/default/pods/life/ephemeralcontainers",
            patch,
            "application/strategic-merge-patch+json",
        )
        eventually(
            lambda: "terminated" in _ephemeral(kube.pod("life"), "debug").get("state", {}),
            what=lambda: f"the debug container ran: {kube.pod('life')['status']}; {kube.events('life')}",
        )
        assert "ps" in kube.log("life", "debug")


def test_probes_go_on_while_a_container_takes_all_the_cpu_it_may(kube: Cluster) -> None:
    """The kubelet asks every second, and gives each probe more time than an emulated processor needs."""
    often = {"exec": {"command": ["sh", "-c", "echo probed >>/tmp/probes"]}, "periodSeconds": 1, "timeoutSeconds": 20}
    busy = container(
        "for number in 1 2 3 4; do (while :; do :; done) & done; tail -n +1 -F /tmp/probes",
        livenessProbe={**often, "failureThreshold": 1},
        readinessProbe={**often, "failureThreshold": 1},
        resources={"requests": {"cpu": "500m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}},
    )
    with kube.running("busy", busy, restartPolicy="Always"):
        kube.phase("busy", "Running")
        eventually(
            lambda: kube.log("busy").count("probed") >= 20,
            what=lambda: f"twenty probes ran: {kube.pod('busy')['status']}; {kube.events('busy')}",
            within_s=250,
        )
        found = status(kube.pod("busy"))
        assert (found["restartCount"], found["ready"]) == (0, True)
        assert not [text for reason, text in kube.events("busy") if reason == "Unhealthy"]


def _memory_of(kube: Cluster, name: str) -> int:
    return int(_figures_of(kube, name, "memory").get("workingSetBytes", 0))


def _figures_of(kube: Cluster, name: str, kind: str) -> Any:
    """Of a pod in the kubelet's summary."""
    return {each["podRef"]["name"]: each for each in kube.stats()["pods"]}.get(name, {}).get(kind, {})


@pytest.mark.skipif(peers.MINOR >= 37, reason="needs the gate PodAndContainerStatsFromCRI there, for pods of runc, too")
@pytest.mark.parametrize(("handler", "has_processes"), [("pykata", False), ("runc", True)])
def test_a_byte_is_counted_once_in_the_network_figures_of_a_pod(
    kube: Cluster, handler: str, has_processes: bool
) -> None:
    """The kubelet takes them from its cAdvisor, which finds the pod by its sandbox's cgroup and asks containerd.

    Processes it counts in the cgroups of containers, which a pod in a VM does not have on the host.
    """
    name = f"figures-{handler}"
    with socket.create_server((ADDRESS, 0)) as server, kube.runtime_class("beside", "runc"):
        send = f"head -c {MIB} /dev/zero | nc {ADDRESS} {server.getsockname()[1]}; {SLEEP}"
        with kube.running(name, container(send), runtimeClassName={"runc": "beside"}.get(handler, handler)):
            connection, _ = server.accept()
            with connection:
                assert sum(iter(lambda: len(connection.recv(1 << 16)), 0)) == MIB
            network = eventually(
                lambda: _sent(_figures_of(kube, name, "network")),
                what=lambda: f"the summary has what the pod has sent: {kube.stats()['pods']}",
            )
            eventually(
                lambda: bool(_figures_of(kube, name, "process_stats")) == has_processes,
                what=lambda: f"the processes of the pod, if it has any on the host: {kube.stats()['pods']}",
            )
            scraped = str(kube.call("GET", f"/api/v1/nodes/{NODE}/proxy/metrics/cadvisor")).splitlines()

    assert [each["name"] for each in network["interfaces"]] == ["eth0"]
    assert MIB < network["txBytes"] < 2 * MIB
    sent = [line for line in scraped if line.startswith("container_network_transmit_bytes_total") and name in line]
    assert len(sent) == 1
    assert 'interface="eth0"' in sent[0]


WRITES = f"""\
dd if=/dev/zero of=/written bs=1M count=8
dd if=/dev/zero of=/v/written bs=1M count=16
{SLEEP}"""
"""8 MiB in the root file system and 16 MiB in a volume."""
VOLUME: dict[str, Any] = {"volumeMounts": [{"name": "disk", "mountPath": "/v"}]}


@pytest.mark.parametrize("handler", ["pykata", "runc"])
def test_what_a_pod_writes_counts_as_its_ephemeral_storage(kube: Cluster, handler: str) -> None:
    name = f"writes-{handler}"
    of_class = {"runc": "beside"}.get(handler, handler)
    volumes = [{"name": "disk", "emptyDir": {}}]
    with (
        kube.runtime_class("beside", "runc"),
        kube.running(name, container(WRITES, **VOLUME), volumes=volumes, runtimeClassName=of_class),
    ):
        found = eventually(
            lambda: _counted(kube, name),
            what=lambda: f"the summary has what the pod has written: {kube.stats()['pods']}",
        )

    assert (found["volume"] // MIB, found["root"] // MIB) == (16, 8)
    assert 0 <= found["pod"] - found["volume"] - found["root"] < MIB  # logs and the kubelet's own files


def _counted(kube: Cluster, name: str) -> dict[str, int]:
    """Bytes of a pod's volume, of its container's root and of all its ephemeral storage, once each is counted whole."""
    pod = {each["podRef"]["name"]: each for each in kube.stats()["pods"]}.get(name, {})
    found = {
        "volume": {each["name"]: each for each in pod.get("volume", ())}.get("disk", {}).get("usedBytes", 0),
        "root": next(iter(pod.get("containers") or [{}])).get("rootfs", {}).get("usedBytes", 0),
        "pod": pod.get("ephemeral-storage", {}).get("usedBytes", 0),
    }
    is_whole = found["volume"] >= 16 * MIB and found["root"] >= 8 * MIB and found["pod"] >= 24 * MIB
    return found if is_whole else {}


@pytest.mark.parametrize(
    ("emptied", "more", "message"),
    [
        ({"sizeLimit": "4Mi"}, {}, 'Usage of EmptyDir volume "disk" exceeds the limit "4Mi"'),
        ({}, {"resources": {"limits": {"ephemeral-storage": "4Mi"}}}, "exceeds the total limit of containers 4Mi"),
    ],
    ids=["a volume's limit", "the pod's limit"],
)
def test_a_pod_that_writes_more_than_it_may_is_evicted(
    kube: Cluster, emptied: dict[str, str], more: dict[str, Any], message: str
) -> None:
    main = container(WRITES, **VOLUME, **more)
    with kube.running("greedy", main, volumes=[{"name": "disk", "emptyDir": emptied}]):
        found = kube.phase("greedy", "Failed", "Succeeded")["status"]

    assert found.get("reason") == "Evicted", found
    assert message in found["message"]


def _sent(network: Any) -> Any:
    """The figures, once they have the bytes of the test."""
    return network if network.get("txBytes", 0) > MIB else None


def _ephemeral(pod: Any, name: str) -> Any:
    return next((each for each in pod["status"].get("ephemeralContainerStatuses", ()) if each["name"] == name), {})


def test_the_vm_is_as_large_as_the_pods_limits(kube: Cluster) -> None:
    script = "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo"
    with kube.running("sized", container(script, **limits("1", "256Mi"))):
        kube.phase("sized", "Succeeded", "Failed")
        processors, memory_kib = map(int, kube.log("sized").split())

    assert processors == 2  # 1 and the overhead of 0.25, rounded up once
    assert 256 <= memory_kib / 1024 <= 256 + 112


def test_events_of_one_refusal_merge(kube: Cluster) -> None:
    kube.create("pods", manifest("again", container(SLEEP), hostNetwork=True))
    try:
        listed = "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=again"

        def refusals() -> list[Any]:
            items = kube.call("GET", listed)["items"]
            return [each for each in items if each["reason"] == "FailedCreatePodSandBox"]

        eventually(lambda: sum(each.get("count") or 1 for each in refusals()) >= 2, what="it was tried twice")
        # containerd 2.x names the sandbox, which is another one each time; the rest is ours.
        ours = {re.sub("[0-9a-f]{64}", "ID", each["message"]) for each in refusals()}
        assert len(ours) == 1, ours
        assert "hostNetwork" in ours.pop()
    finally:
        kube.delete("again", 0)


def test_the_runtime_class_adds_its_overhead(kube: Cluster) -> None:
    created = kube.create("pods", manifest("overhead", container("true")))
    try:
        assert created["spec"]["overhead"] == {"cpu": "250m", "memory": "320Mi"}
    finally:
        kube.delete("overhead", 0)
    with pytest.raises(Refused, match="RuntimeClass"):
        kube.create("pods", manifest("classless", container("true"), runtimeClassName="no-such-class"))


def log_files(pod: str) -> list[Path]:
    """The main container's, the oldest first; a rotated file is packed once there is a younger one."""
    (directory,) = Path("/var/log/pods").glob(f"default_{pod}_*/main")
    return [*sorted(path for path in directory.glob("0.log.*") if path.suffix != ".tmp"), directory / "0.log"]


def numbers_in(path: Path) -> list[int]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [int(number) for number in re.findall(r" stdout F line (\d+)$", text, re.MULTILINE)]


def test_a_log_is_rotated_while_the_container_writes_and_no_line_is_lost(kube: Cluster) -> None:
    line = "i=$((i+1)); echo line $i"
    script = f"i=0; while [ $i -lt 3000 ]; do {line}; done; while :; do {line}; sleep 0.2; done"
    with kube.running("talks", container(script)):
        kube.phase("talks", "Running")
        eventually(lambda: len(log_files("talks")) > 1, what="the kubelet has rotated the log", within_s=120)
        eventually(lambda: numbers_in(log_files("talks")[-1]), what="the output goes on in the new file")
        seen = [number for path in log_files("talks") for number in numbers_in(path)]

    assert len(seen) > 3000
    assert seen == list(range(1, len(seen) + 1))
