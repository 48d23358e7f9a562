"""A pod's configuration as a spec, and the files of its containers."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.oci import Caller, ContainerKind, OciSpec, caller_of, parse_spec, pod_of
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns, PodResourceSums, SandboxRequest
from pyshim.pod.plan.pod_spec import let_through, pod_files, pod_spec, with_files
from pyshim.resources.sizing.plan.workload import workload

POD = PodConfig(
    name="web",
    namespace="default",
    uid="u1",
    hostname="web-0",
    dns=PodDns(servers=("10.0.0.10", "10.0.0.11"), searches=("a.local", "b.local"), options=("ndots:5", "edns0")),
    annotations={},
    cgroup_parent="",
    sysctls={},
    resources=None,
    host_namespaces=frozenset(),
)
FILES = {path: HostPath(f"/b/p1{path}") for path in ("/etc/resolv.conf", "/etc/hostname", "/etc/hosts")}


def spec_of(pod: PodConfig = POD, netns_path: str = "/run/netns/p1", **annotations: str) -> OciSpec:
    request = CreateSandbox(
        sandbox_id=SandboxId("p1"), bundle=HostPath("/b/p1"), netns_path=netns_path, annotations=annotations, pod=pod
    )
    return pod_spec(request, pod, FILES)


def container_spec(**members: Any) -> OciSpec:
    document = {"process": {"args": ["sleep"], "cwd": "/"}, "root": {"path": "rootfs"}, **members}
    return parse_spec(json.dumps(document).encode(), "config.json")


def test_the_pod_is_named_as_containerd_names_it() -> None:
    spec = spec_of()

    assert caller_of(spec.annotations) is Caller.CONTAINERD
    pod = pod_of(spec.annotations)
    assert (pod.name, pod.namespace, pod.uid) == ("web", "default", "u1")
    assert spec.hostname == "web-0"
    assert spec.namespace_path("network") == "/run/netns/p1"


def test_its_size_is_the_sum_of_its_containers() -> None:
    size = PodResourceSums(cpu_period=100_000, cpu_quota=150_000, cpu_shares=1536, memory_bytes=512 << 20)

    found = workload(ContainerKind.POD_SANDBOX, spec_of(replace(POD, resources=size)).annotations, {})

    assert (float(found.vcpus), found.memory_bytes) == (1.5, 512 << 20)


def test_a_pod_without_limits_states_none() -> None:
    found = workload(ContainerKind.POD_SANDBOX, spec_of().annotations, {})

    assert (found.vcpus, found.memory_bytes) == (0, 0)


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param({"io.kubernetes.cri.sandbox-cpu-quota": "9", "io.kubernetes.cri.sandbox-memory": "9"}, id="size"),
        pytest.param({"io.kubernetes.cri.container-type": "container"}, id="kind"),
        pytest.param({"io.kubernetes.cri.sandbox-uid": "other"}, id="uid"),
        pytest.param({"io.kubernetes.cri-o.ContainerType": "sandbox"}, id="crio"),
        pytest.param({"io.kubernetes.docker.type": "podsandbox", "io.kubernetes.sandbox.id": "x"}, id="dockerd"),
    ],
)
def test_a_pods_own_annotations_never_pass_for_its_runtimes(forged: Mapping[str, str]) -> None:
    spec = spec_of(replace(POD, annotations={**forged, "io.katacontainers.x": "y"}))

    assert spec.annotations == {**spec_of().annotations, "io.katacontainers.x": "y"}


@pytest.mark.parametrize(
    ("kind", "patterns", "kept"),
    [
        pytest.param(ContainerKind.POD_SANDBOX, ("io.katacontainers.*",), {"io.katacontainers.x"}, id="default"),
        pytest.param(ContainerKind.POD_SANDBOX, (), set(), id="none"),
        pytest.param(ContainerKind.POD_SANDBOX, ("cdi.k8s.io/*",), {"cdi.k8s.io/gpu"}, id="devices permitted"),
        pytest.param(
            ContainerKind.SINGLE_CONTAINER,
            ("io.katacontainers.*",),
            {"io.katacontainers.x", "cdi.k8s.io/gpu", "example.com/note"},
            id="no pod: the control",
        ),
    ],
)
def test_of_a_pods_own_annotations_those_count_that_the_node_lets_through(
    kind: ContainerKind, patterns: tuple[str, ...], kept: set[str]
) -> None:
    """Both APIs may pass all of them on. The runtime's own stay."""
    written = {"io.katacontainers.x": "1", "cdi.k8s.io/gpu": "vendor.com/class=vfio", "example.com/note": "x"}
    spec = spec_of(replace(POD, annotations=written))
    request = SandboxRequest(sandbox_id=SandboxId("p1"), kind=kind, spec=spec, options=None)

    found = let_through(request, patterns).spec

    assert {key for key in written if key in found.annotations} == kept
    assert found.raw["annotations"] == found.annotations
    assert (pod_of(found.annotations), caller_of(found.annotations)) == (pod_of(spec.annotations), Caller.CONTAINERD)


def test_annotations_of_the_request_are_added_to_the_pods() -> None:
    spec = spec_of(replace(POD, annotations={"a": "pod", "b": "pod"}), b="request")

    assert (spec.annotations["a"], spec.annotations["b"]) == ("pod", "request")


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        ("", ""),
        ("/kubepods/burstable/podu1", "/kubepods/burstable/podu1/p1"),
        ("/kubepods.slice/kubepods-podu1.slice", "kubepods-podu1.slice:cri-containerd:p1"),
    ],
    ids=["none", "cgroupfs", "systemd"],
)
def test_the_cgroup_is_below_the_pods(parent: str, path: str) -> None:
    assert spec_of(replace(POD, cgroup_parent=parent)).cgroups_path == path


def test_a_pod_in_the_hosts_network_has_no_network_namespace_and_none_of_its_sysctls() -> None:
    spec = spec_of(replace(POD, host_namespaces=frozenset({"network", "pid"})), netns_path="")

    assert [namespace.type for namespace in spec.namespaces] == ["ipc", "uts", "mount"]
    assert spec.raw["linux"]["sysctl"] == {}


def test_sysctls_of_the_pod_replace_containerds_defaults() -> None:
    asked = {"net.ipv4.ip_unprivileged_port_start": "1024", "kernel.shm_rmid_forced": "1"}

    assert spec_of(replace(POD, sysctls=asked)).raw["linux"]["sysctl"] == {
        **asked,
        "net.ipv4.ping_group_range": "0 2147483647",
    }


def test_the_pods_files_have_its_dns_and_hostname() -> None:
    assert pod_files(SandboxId("p1"), POD, b"host") == {
        "/etc/resolv.conf": b"nameserver 10.0.0.10\nnameserver 10.0.0.11\n"
        b"search a.local b.local\noptions ndots:5 edns0\n",
        "/etc/hostname": b"web-0\n",
        "/etc/hosts": b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    }


def test_a_pod_without_dns_has_the_hosts_and_one_without_a_name_that_of_its_id() -> None:
    files = pod_files(SandboxId("0123456789abcdef"), replace(POD, dns=None, hostname=""), b"nameserver 1.1.1.1\n")

    assert files["/etc/resolv.conf"] == b"nameserver 1.1.1.1\n"
    assert files["/etc/hostname"] == b"0123456789ab\n"


@pytest.mark.parametrize(("read_only", "access"), [(False, "rw"), (True, "ro")])
def test_a_container_gets_the_files_it_has_no_mount_for(read_only: bool, access: str) -> None:
    own = {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts", "options": ["rbind"]}
    before = container_spec(mounts=[own], root={"path": "rootfs", "readonly": read_only})

    spec = with_files(before, FILES)

    assert spec.raw["mounts"][0] == own
    assert [(mount.destination, mount.source, mount.options) for mount in spec.mounts[1:]] == [
        ("/etc/resolv.conf", "/b/p1/etc/resolv.conf", ("rbind", access)),
        ("/etc/hostname", "/b/p1/etc/hostname", ("rbind", access)),
    ]
    assert parse_spec(json.dumps(spec.raw).encode(), "x").mounts == spec.mounts


def test_a_container_of_a_pod_without_files_keeps_its_spec() -> None:
    spec = container_spec()

    assert with_files(spec, {}).mounts == spec.mounts
