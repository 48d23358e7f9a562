"""Devices of a cloud, claimed by pods with remote VMs: from the operator's table to the device in the container.

API server, scheduler and kubelet are real. The peer makes the VMs; its guests have device specs as a GPU's driver would
write them, whose edit is a variable.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from guest.image.rootfs import PARTITION_OFFSET_BYTES, pack_root
from integration.framework import cri_session, images, releases
from integration.framework.cri import CRI_IMAGE
from integration.framework.remote_peer import RemotePeer, remote_peer
from integration.framework.waiting import eventually

from . import helm, peers
from .cluster import ADDRESS, GROUND, NODE, PROJECT, TOKEN, Cluster, Daemon, container, manifest
from .test_pods import SLEEP

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(releases.chosen().numbers < (2, 0), reason="this release has no CDI (CONTAINERD=2.3 has)"),
]

_RESOURCE = "/apis/resource.k8s.io/v1"
_HYPERVISOR = "io.katacontainers.config.hypervisor."
CDI = Path("/run/cdi")
TABLE = """
[[type]]
name = "one-gpu"
vcpus = 4
memory_mib = 8192
price = "1.10"
device = "toy"
devices = 1

[[type]]
name = "two-gpus"
vcpus = 8
memory_mib = 16384
price = "2.20"
device = "toy"
devices = 2

[device.toy]
kind = "nvidia.com/gpu"
model = "TOY"
memory_mib = 40960
count = {count}
"""

PARTITIONED = """
[[type]]
name = "whole-gpu"
vcpus = 8
memory_mib = 16384
device = "whole"
devices = 1

[[type]]
name = "half-gpu"
vcpus = 4
memory_mib = 8192
device = "half"
devices = 1

[device.whole]
kind = "nvidia.com/gpu"
memory_mib = 81920
quota = "gpu"
units = 2

[device.half]
kind = "nvidia.com/gpu"
memory_mib = 40960
quota = "gpu"
units = 1

[quota.gpu]
units = 2
"""


@pytest.fixture(scope="module")
def gpu_guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built guest, with specs for two GPUs that set a variable each."""
    built, made = PROJECT / ".build" / "guest", tmp_path_factory.mktemp("gpu-guest")
    for name in ("vmlinux", "vmlinuz", "initrd.img"):
        (made / name).symlink_to(built / name)
    content, tree = made / "root.erofs", made / "tree"
    with (built / "rootfs.img").open("rb") as disk, content.open("wb") as partition:
        disk.seek(PARTITION_OFFSET_BYTES)
        shutil.copyfileobj(disk, partition)
    subprocess.run(["fsck.erofs", f"--extract={tree}", content], check=True, capture_output=True)
    devices = [{"name": name, "containerEdits": {"env": [f"GPU_{name}=here"]}} for name in ("0", "1", "all")]
    (tree / "etc" / "cdi").mkdir()
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
    (tree / "etc" / "cdi" / "gpu.json").write_text(json.dumps(spec))
    content.unlink()
    pack_root(tree, made / "rootfs.img")
    shutil.rmtree(tree)
    return made


@pytest.fixture(scope="module")
def gpus(kube: Cluster, gpu_guest: Path) -> Iterator[RemotePeer]:
    """The class `remote`, whose VMs the peer makes and whose types are chosen by the table."""
    archive = GROUND / "images.tar"
    images.write_archive(archive, CRI_IMAGE)
    table = GROUND / "instances.toml"
    table.write_text(TABLE.format(count=2))
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "cloud"},
        "spec": {"selectors": [{"cel": {"expression": 'device.driver == "cloud.pyshim.io"'}}]},
    }
    with (
        remote_peer(GROUND / "peer.log", archive, guest=gpu_guest) as peer,
        kube.runtime_class("remote", cri_session.REMOTE_HANDLER),
    ):
        config = peer.configuration(cri_session.REMOTE_CONFIG.parent)
        text = config.read_text()
        keys = f'instance_types = "{table}"\npod_resource_api_sock = "/var/lib/kubelet/pod-resources/kubelet.sock"\n'
        config.write_text(text.replace("[runtime]\n", f"[runtime]\n{keys}"))
        kube.call("POST", f"{_RESOURCE}/deviceclasses", device_class)
        yield peer
        kube.call("DELETE", f"{_RESOURCE}/deviceclasses/cloud")
        config.unlink()


@pytest.fixture(scope="module")
def driver(kube: Cluster, gpus: RemotePeer) -> Iterator[Daemon]:
    CDI.mkdir()
    (GROUND / "token").write_text(TOKEN)
    words = (
        *("dra", "run", "--types", str(GROUND / "instances.toml"), "--server", f"https://{ADDRESS}"),
        *("--token", str(GROUND / "token"), "--authority", str(GROUND / "api-server" / "apiserver.crt")),
    )
    with Daemon(str(PROJECT / "bin" / "pyshim"), *words) as running:
        eventually(lambda: offered(kube) == ["toy-0", "toy-1"], what=lambda: f"the devices are offered: {log()}")
        yield running
        subprocess.run([PROJECT / "bin" / "pyshim", "dra", "withdraw", *words[4:]], check=True, capture_output=True)
        assert offered(kube) == []
    CDI.rmdir()


def log() -> str:
    return (GROUND / "pyshim.log").read_text(errors="replace")[-2000:]


def offered(kube: Cluster) -> list[str]:
    found = kube.call("GET", f"{_RESOURCE}/resourceslices")["items"]
    newest = max((each["spec"]["pool"]["generation"] for each in found), default=0)
    slices = [each for each in found if each["spec"]["pool"]["generation"] == newest]
    return sorted(device["name"] for each in slices for device in each["spec"].get("devices", ()))


def test_the_api_server_takes_the_charts_examples(kube: Cluster, gpus: RemotePeer) -> None:
    for each in yaml.safe_load_all((helm.CHART / "files" / "claims.yaml").read_text()):
        path = f"{_RESOURCE}/namespaces/default/resourceclaimtemplates?dryRun=All&fieldValidation=Strict"
        kube.call("POST", path, each)


@contextlib.contextmanager
def template(kube: Cluster, name: str, at_least: str) -> Iterator[None]:
    """A ResourceClaimTemplate for one device with `at_least` of memory."""
    expression = f'device.capacity["cloud.pyshim.io"].memory.compareTo(quantity("{at_least}")) >= 0'
    exactly = {"deviceClassName": "cloud", "selectors": [{"cel": {"expression": expression}}]}
    made = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }
    path = f"{_RESOURCE}/namespaces/default/resourceclaimtemplates"
    kube.call("POST", path, made)
    try:
        yield
    finally:
        kube.call("DELETE", f"{path}/{name}")


def claiming(name: str, claims: dict[str, str], *containers: dict[str, Any]) -> dict[str, Any]:
    """A pod that the scheduler has to place; `claims` are names of templates, by the claim's name in the pod."""
    pod = manifest(
        name,
        *containers,
        runtimeClassName="remote",
        resourceClaims=[{"name": key, "resourceClaimTemplateName": value} for key, value in claims.items()],
    )
    del pod["spec"]["nodeName"]
    return pod


def given(script: str, name: str, *claims: str) -> dict[str, Any]:
    return container(script, name, resources={"claims": [{"name": claim} for claim in claims]})


@contextlib.contextmanager
def created(kube: Cluster, pod: dict[str, Any]) -> Iterator[str]:
    name = pod["metadata"]["name"]
    kube.create("pods", pod)
    try:
        yield name
    finally:
        kube.delete(name, 1)


def claims_of(kube: Cluster) -> list[Any]:
    found: list[Any] = kube.call("GET", f"{_RESOURCE}/namespaces/default/resourceclaims")["items"]
    return found


def nothing_prepared() -> bool:
    return not list(CDI.glob("pyshim.io-*")) and not list(
        Path("/var/lib/kubelet/plugins/cloud.pyshim.io/claims").glob("*")
    )


def all_is_released(kube: Cluster) -> None:
    eventually(lambda: not claims_of(kube), what=lambda: f"no claim is left: {claims_of(kube)}")
    eventually(nothing_prepared, what=lambda: f"nothing is prepared: {log()}")


def types_of(gpus: RemotePeer) -> list[str]:
    return [record["annotations"][f"{_HYPERVISOR}machine_type"] for record in gpus.records()]


def waits_for_a_device(kube: Cluster, pod: str) -> bool:
    return "cannot allocate all claims" in kube.event(pod, "FailedScheduling")


ENVIRONMENT = f"env | grep ^GPU_; {SLEEP}"


def test_each_container_has_its_own_device_in_a_vm_of_the_right_type(
    kube: Cluster, gpus: RemotePeer, driver: Daemon
) -> None:
    containers = (given(ENVIRONMENT, "a", "first"), given(ENVIRONMENT, "b", "second"), container(ENVIRONMENT, "c"))
    with template(kube, "gpu-40g", "40Gi"):
        with created(kube, claiming("both", {"first": "gpu-40g", "second": "gpu-40g"}, *containers)) as pod:
            assert kube.phase(pod, "Running")["spec"]["nodeName"] == NODE
            (record,) = gpus.records()
            names = ("machine_type", "default_gpus", "default_gpu_model")
            assert [record["annotations"][f"{_HYPERVISOR}{name}"] for name in names] == ["two-gpus", "2", "TOY"]
            eventually(lambda: kube.log(pod, "a") and kube.log(pod, "b"), what="both containers print")
            assert [kube.log(pod, each) for each in ("a", "b", "c")] == ["GPU_0=here\n", "GPU_1=here\n", ""]
        all_is_released(kube)
    assert not gpus.records()


def test_two_pods_compete_for_the_last_device_and_what_no_type_has_waits(
    kube: Cluster, gpus: RemotePeer, driver: Daemon
) -> None:
    table = GROUND / "instances.toml"
    table.write_text(TABLE.format(count=1))
    eventually(lambda: offered(kube) == ["toy-0"], what=lambda: f"one device is offered: {log()}")
    try:
        with template(kube, "gpu", "40Gi"), template(kube, "huge", "80Gi"):
            first, second = (claiming(name, {"gpu": "gpu"}, given(SLEEP, "main", "gpu")) for name in ("one", "two"))
            with created(kube, claiming("never", {"gpu": "huge"}, given(SLEEP, "main", "gpu"))) as never:
                with created(kube, second) as two, created(kube, first) as one:
                    winner = eventually(
                        lambda: next((each for each in (one, two) if "nodeName" in kube.pod(each)["spec"]), ""),
                        what="a pod is scheduled",
                    )
                    loser = two if winner == one else one
                    kube.phase(winner, "Running")
                    assert types_of(gpus) == ["one-gpu"]
                    assert waits_for_a_device(kube, loser)
                    kube.delete(winner, 1)
                    kube.phase(loser, "Running")
                assert waits_for_a_device(kube, never)
                assert "nodeName" not in kube.pod(never)["spec"]
            all_is_released(kube)
    finally:
        table.write_text(TABLE.format(count=2))
        eventually(lambda: offered(kube) == ["toy-0", "toy-1"], what="the devices are offered again")


@pytest.mark.skipif(peers.MINOR < 36, reason="the API server has no shared counters (KUBERNETES=v1.36.3 has)")
def test_a_whole_device_waits_until_none_of_its_partitions_is_taken(
    kube: Cluster, gpus: RemotePeer, driver: Daemon
) -> None:
    table = GROUND / "instances.toml"
    table.write_text(PARTITIONED)
    names = ["half-0", "half-1", "whole-0"]
    eventually(lambda: offered(kube) == names, what=lambda: f"partitions are offered: {log()}")
    try:
        with template(kube, "half", "40Gi"), template(kube, "whole", "80Gi"):
            half, whole = (claiming(each, {"gpu": each}, given(SLEEP, "main", "gpu")) for each in ("half", "whole"))
            with created(kube, half) as small:
                kube.phase(small, "Running")
                assert types_of(gpus) == ["half-gpu"]
                with created(kube, whole) as large:
                    assert waits_for_a_device(kube, large)
                    kube.delete(small, 1)
                    kube.phase(large, "Running")
                    assert types_of(gpus) == ["whole-gpu"]
            all_is_released(kube)
    finally:
        table.write_text(TABLE.format(count=2))
        eventually(lambda: offered(kube) == ["toy-0", "toy-1"], what="the devices are offered again")


def test_restarts_of_kubelet_driver_and_containerd_lose_no_claim(
    kube: Cluster, gpus: RemotePeer, driver: Daemon
) -> None:
    """A pod that runs keeps its device, and one that is created meanwhile gets its own once all are back."""
    with template(kube, "gpu", "40Gi"):
        with created(kube, claiming("early", {"gpu": "gpu"}, given(ENVIRONMENT, "main", "gpu"))) as early:
            kube.phase(early, "Running")
            driver.stop(signal.SIGKILL)
            with created(kube, claiming("late", {"gpu": "gpu"}, given(ENVIRONMENT, "main", "gpu"))) as late:
                eventually(lambda: "nodeName" in kube.pod(late)["spec"], what="the late pod is scheduled")
                kube.kubelet.stop(signal.SIGKILL)
                kube.cri.daemon.restart(signal.SIGKILL)
                driver.start()
                kube.start_kubelet()
                kube.phase(late, "Running")
                assert kube.log(late) == "GPU_0=here\n"
                assert kube.pod(early)["status"]["containerStatuses"][0]["restartCount"] == 0
                assert len(gpus.records()) == 2
        all_is_released(kube)


def test_what_the_cloud_refuses_is_an_event_and_the_claim_is_free_again(
    kube: Cluster, gpus: RemotePeer, driver: Daemon
) -> None:
    pod = claiming("refused", {"gpu": "gpu"}, given(SLEEP, "main", "gpu"))
    fault = gpus.faults("CreateVM:before=error(quota exceeded)")
    with template(kube, "gpu", "40Gi"), fault, created(kube, pod) as name:
        assert "quota exceeded" in kube.event(name, "FailedCreatePodSandBox")
    all_is_released(kube)
