"""The need of a pod's VM on its node, as counted from its manifest and as the shim asks for it."""

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.oci import ContainerKind, parse_spec
from pyshim.model.sizing import PlacementRequest
from pyshim.model.units import GIB
from pyshim.node.kubernetes.pod_size import PodContainer, PodSizing, with_defaults
from pyshim.node.kubernetes.pod_vm import pod_need
from pyshim.pod.plan.placement import placement_request
from tests.fakes.facts import host_facts
from tests.fakes.sandbox_plans import planned

HOST = host_facts(cpu_count=64, memory_mib=1 << 20)


def config(*, policy: str = "overhead", static: bool = True) -> Config:
    qemu = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}
    sizes = {"default_vcpus": 1, "default_memory": 512, "overhead_vcpus": Fraction(1, 4), "overhead_memory": 112}
    runtime = {"static_sandbox_resource_mgmt": static, "sizing_policy": policy}
    tables = {"hypervisor": {"qemu": {**qemu, **sizes}}, "agent": {}, "runtime": runtime}
    return build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))


def asked_by_the_shim(pod: PodSizing, of: Config) -> PlacementRequest:
    """containerd's annotations of the pod, and the cgroup that the kubelet has for its class."""
    parent = "/kubepods" if pod.is_guaranteed() else "/kubepods/burstable"
    document: dict[str, Any] = {
        "ociVersion": "1.1.0",
        "process": {"args": ["/pause"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "annotations": {
            **pod.sandbox_annotations(),
            "io.kubernetes.cri.container-type": "sandbox",
            "io.kubernetes.cri.sandbox-namespace": "prod",
            "io.kubernetes.cri.sandbox-name": "db",
        },
        "linux": {"cgroupsPath": f"{parent}/pod1/s1", "namespaces": [{"type": "network", "path": "/run/netns/1"}]},
    }
    spec = parse_spec(json.dumps(document).encode(), "config.json")
    return placement_request(planned(of, HOST, spec, sandbox_id="prod/db", kind=ContainerKind.POD_SANDBOX), spec)


def container(cpu: Fraction, memory: int, *, requested: bool = True, **more: Any) -> PodContainer:
    limits = {name: amount for name, amount in (("cpu", cpu), ("memory", Fraction(memory))) if amount}
    requests = {} if requested else {"cpu": cpu / 2}
    return PodContainer(name="c", limits=limits, requests=with_defaults(requests, limits), **more)


_cpus = st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5, 2)])
_containers = st.builds(
    container,
    _cpus,
    st.sampled_from([0, GIB // 4, GIB, 3 * GIB + 1]),
    requested=st.booleans(),
    restartable=st.booleans(),
)
_pods = st.builds(
    PodSizing,
    containers=st.lists(_containers, min_size=1, max_size=3).map(tuple),
    init_containers=st.lists(_containers, max_size=2).map(tuple),
    requests=st.just({}),
    limits=st.sampled_from([{}, {"cpu": Fraction(2), "memory": Fraction(GIB)}]),
    overhead=st.sampled_from([{}, {"cpu": Fraction(1, 4)}]),
)


@given(pod=_pods, policy=st.sampled_from(["sum", "overhead"]), static=st.booleans())
def test_it_is_what_the_shim_asks_for(pod: PodSizing, policy: str, static: bool) -> None:
    of = config(policy=policy, static=static)

    assert pod_need("prod/db", pod, of, HOST) == asked_by_the_shim(pod, of)


@pytest.mark.parametrize(
    ("containers", "exclusive"),
    [
        pytest.param([container(Fraction(2), GIB)], True, id="whole"),
        pytest.param([container(Fraction(1, 2), GIB)] * 2, True, id="whole-together"),
        pytest.param([container(Fraction(5, 2), GIB)], False, id="a-half"),
        pytest.param([container(Fraction(2), GIB, requested=False)], False, id="burstable"),
        pytest.param([container(Fraction(2), 0)], False, id="no-memory-limit"),
    ],
)
def test_whole_cpus_of_a_guaranteed_pod_are_exclusive(containers: list[PodContainer], exclusive: bool) -> None:
    pod = PodSizing(containers=tuple(containers), init_containers=(), requests={}, limits={}, overhead={})

    assert pod_need("prod/db", pod, config(), HOST).exclusive is exclusive
    assert not pod_need("prod/db", pod, config(static=False), HOST).exclusive
