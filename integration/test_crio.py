"""CRI-O beside containerd: what a pod writes into its own spec, and a restart of CRI-O. Without VMs, on stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from .framework import crio, processes
from .framework.cri import Cri, Pod, pod_config, refusal
from .framework.cri_session import PROJECT, STAND_IN_HANDLER
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.skipif(not crio.is_chosen(), reason="needs CRI-O (hint: CRI=crio)")

NAMESPACES = Path("/run/crio/ns")


def _listed(pod: Pod) -> dict[str, object]:
    command: list[str | Path] = [PROJECT / "bin" / "pyshim", "list", "--json", pod.id]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = json.loads(done.stdout)
    return dict(found)


def test_a_pod_has_the_size_and_the_name_that_crio_says_and_not_those_of_its_own_annotations(cri: Cri) -> None:
    forged = {
        "io.kubernetes.cri.sandbox-name": "kube-proxy",
        "io.kubernetes.cri.sandbox-namespace": "kube-system",
        "io.kubernetes.cri.sandbox-memory": str(64 << 30),
        "io.kubernetes.cri-o.KubeName": "kube-proxy",
        "io.kubernetes.cri-o.PodLinuxResources": '{"memory_limit_in_bytes":68719476736}',
        "pod-linux-resources.crio.io": '{"memory_limit_in_bytes":',
        "io.kubernetes.cri.container-type": "sandbox",
    }
    config = pod_config("web", cri.logs, annotations=forged)
    resources = config.linux.resources
    resources.cpu_quota, resources.cpu_period, resources.memory_limit_in_bytes = 150_000, 100_000, 1 << 30

    pod = Pod.run(cri, config, STAND_IN_HANDLER)
    try:
        found = _listed(pod)
    finally:
        pod.remove()

    assert found["pod"] == "default/web"
    assert found["requested"] == {"vcpus": 1.5, "memory_mib": 1024}


def test_a_pod_that_names_another_pods_sandbox_is_refused_and_harms_it_not(cri: Cri) -> None:
    """CRI-O lets a pod's annotations write over its own in the spec of the sandbox."""
    victim = cri.run_pod("victim", handler=STAND_IN_HANDLER)
    try:
        forged = {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": victim.id}

        refused = refusal(lambda: cri.run_pod("intruder", handler=STAND_IN_HANDLER, annotations=forged))

        assert "is a sandbox itself and cannot join another" in refused
        assert victim.start().is_running
    finally:
        victim.remove()
    assert cri.sandboxes() == []


def _restart(cri: Cri, number: int = signal.SIGTERM) -> None:
    cri.close()
    cri.daemon.restart(number)
    cri.connect()


def _unpin_namespaces() -> None:
    """CRI-O 1.36.3 pins IPC and UTS namespaces, and leaves those of a pod that had ended before its restart."""
    for pinned in (*NAMESPACES.glob("ipcns/*"), *NAMESPACES.glob("utsns/*")):
        subprocess.run(["umount", pinned], check=True)
        pinned.unlink()


def _lose_shim(pod: Pod, runtime: Runtime) -> None:
    """The pod's shim is killed, and the node's cleanup has found that."""
    (shim,) = runtime.shims(pod.id)
    newest, state = pod.containers[-1], runtime.persisted(pod.id)
    eventually(lambda: f'"ID":"{newest.id}"' in state.read_text(), what="the container is in the sandbox's state")
    os.kill(shim.pid, signal.SIGKILL)
    eventually(lambda: not runtime.shims(pod.id), what="the shim is gone")
    subprocess.run([PROJECT / "bin" / "pyshim", "cleanup", pod.id], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_pod_whose_shim_died_is_removed_after_cleanup_and_crios_restart(
    cri: Cri, runtime: Runtime, number: int
) -> None:
    pod = cri.run_pod("orphan", handler=STAND_IN_HANDLER)
    container = pod.start()
    _lose_shim(pod, runtime)
    eventually(lambda: not pod.is_ready, what="the pod is not ready")
    # CRI-O does not connect again: nothing but its restart lets a kubelet stop the container.
    assert "ttrpc: closed" in refusal(lambda: container.stop(1))

    _restart(cri, number)

    assert container.exit_code() == 255
    container.stop(1)
    container.remove()
    pod.remove()
    assert cri.sandboxes() == []
    _unpin_namespaces()


def test_a_pod_whose_shim_died_is_removed_after_cleanup_without_a_restart(cri: Cri, runtime: Runtime) -> None:
    pod = cri.run_pod("orphan", handler=STAND_IN_HANDLER)
    pod.start()
    _lose_shim(pod, runtime)
    eventually(lambda: not pod.is_ready, what="the pod is not ready")

    pod.remove()

    assert cri.sandboxes() == []


def test_a_pod_whose_shim_died_while_crio_was_away_is_removed(cri: Cri, runtime: Runtime) -> None:
    pod = cri.run_pod("orphan", handler=STAND_IN_HANDLER)
    container = pod.start()
    cri.close()
    cri.daemon.stop(signal.SIGKILL)
    (shim,) = runtime.shims(pod.id)
    os.kill(shim.pid, signal.SIGKILL)
    cri.daemon.start()
    cri.connect()
    subprocess.run([PROJECT / "bin" / "pyshim", "cleanup", pod.id], check=True)

    assert container.exit_code() == 255
    pod.remove()
    assert cri.sandboxes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_vm_that_was_lost_while_crio_was_away_is_found_ended(cri: Cri, number: int) -> None:
    pod = cri.run_pod("lost", handler=STAND_IN_HANDLER)
    container = pod.start()
    cri.close()
    cri.daemon.stop(number)
    (vmm,) = processes.find("qemu-system-stub", pod.id)
    os.kill(vmm.pid, signal.SIGKILL)
    cri.daemon.start()
    cri.connect()

    assert container.exit_code() == 255
    assert not pod.is_ready
    pod.remove()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_pods_obey_the_next_crio(cri: Cri, number: int) -> None:
    pod = cri.run_pod("lasting", handler=STAND_IN_HANDLER)
    try:
        container = pod.start()
        _restart(cri, number)

        assert pod.is_ready
        assert container.exec("true").code == 0
        cri.call("ContainerStats", container_id=container.id)
        container.stop(1)
        container.remove()
    finally:
        pod.remove()
    assert cri.sandboxes() == []
