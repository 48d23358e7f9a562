"""Errors of a pod's author, and things that are gone when a pod ends: refused by name, and nothing stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import grpc
import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Cri, Pod, Security, refusal
from .framework.cri_session import STATE
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm


def test_a_pod_container_whose_sandbox_no_shim_serves_is_refused_by_name(cri: Cri, runtime: Runtime) -> None:
    """Past CRI's own check: a task that names a sandbox which does not run."""
    ctr = cri.daemon.ctr
    labels = ("--annotation", "io.kubernetes.cri.container-type=container")
    sandbox = ("--annotation", "io.kubernetes.cri.sandbox-id=nobody")
    words = (*ctr.run_words("--rm", *labels, *sandbox), "docker.io/local/busybox:test", "orphan")
    try:
        done = ctr("--namespace", "k8s.io", *words, "true", check=False)
        assert done.code != 0
        assert "nobody" in done.err
        assert not runtime.vmms("orphan")
    finally:
        ctr("--namespace", "k8s.io", "container", "rm", "orphan", check=False)


def test_a_pod_whose_network_namespace_has_gone_is_stopped_and_removed(cri: Cri) -> None:
    with cri.pod() as pod:
        pod.start()
        # CRI-O keeps the file open.
        subprocess.run(["umount", "--lazy", str(pod.namespace)], check=True)

        pod.stop()
        cri.call("RemovePodSandbox", pod_sandbox_id=pod.id)


def test_a_pod_whose_link_has_gone_is_stopped_and_removed(cri: Cri) -> None:
    with cri.pod() as pod:
        container = pod.start()
        namespace = pod.namespace
        subprocess.run(["nsenter", f"--net={namespace}", "ip", "link", "delete", "eth0"], check=True)

        assert container.sh("echo fine") == "fine\n"
        pod.stop()


@pytest.mark.parametrize("kind", ["missing", "dangling"])
def test_a_volume_that_is_not_there(pod: Pod, scratch: Path, kind: str) -> None:
    """containerd makes a missing source a directory, as docker did; one it cannot make is refused by name."""
    source = scratch / "volume"
    if kind == "dangling":
        os.symlink("/no/such/place", source)
    mounts = [pb.Mount(container_path="/data", host_path=str(source))]

    if kind == "missing":
        assert pod.start(mounts=mounts).sh("ls -d /data") == "/data\n"
    else:
        assert str(source) in refusal(lambda: pod.start(mounts=mounts))


def test_a_seccomp_profile_that_is_no_profile_is_refused(pod: Pod, scratch: Path) -> None:
    profile = scratch / "profile.json"
    profile.write_text('{"defaultAction": "SCMP_ACT_DANCE", "syscalls": []}')
    local = pb.SecurityProfile(profile_type=pb.SecurityProfile.Localhost, localhost_ref=str(profile))

    assert "SCMP_ACT_DANCE" in refusal(lambda: pod.start(security=Security(seccomp=local)))


def test_a_capability_the_guest_does_not_know_gives_nothing(pod: Pod) -> None:
    """As with runc, which leaves out what its kernel lacks: a newer containerd may know more of them than the guest."""
    wanted = Security(capabilities=pb.Capability(add_capabilities=["FLY"]))
    read = "grep ^Cap /proc/self/status"

    assert pod.start(security=wanted).sh(read) == pod.start().sh(read)


def test_a_pod_that_fails_to_start_leaves_nothing(cri: Cri) -> None:
    """Its annotations ask for more memory than any host has."""
    asked = {"io.katacontainers.config.hypervisor.default_memory": "999999999"}

    before = cri.sandboxes()

    with pytest.raises(grpc.RpcError):
        cri.run_pod("too-big", annotations=asked)

    eventually(lambda: cri.sandboxes() == before, what="the sandbox is not listed")
    bundles = STATE.glob("io.containerd.runtime.v2.task/k8s.io/*")
    assert {bundle.name for bundle in bundles} <= {*before, *cri.containers()}
