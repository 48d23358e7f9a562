"""Where Kubernetes' figures of a pod and its VM disagree, and the overhead that makes them agree."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import LETTERS, Explanation, explain_pod
from pyshim.node.kubernetes.pod_size import PodSizing
from tests.fakes.facts import host_facts
from tests.fakes.inputs import config, configured, host
from tests.unit.node.kubernetes.test_pod_size import amounts, container, pod

HOST_SIDE = 200
CONFIG = build_config(Source(path="t", directory="/", document={"hypervisor": {"qemu": {}}}))
HOST = host_facts()


def explained(config: Config, host: HostFacts, found: PodSizing) -> Explanation:
    return explain_pod(found, config, host, host_side_mib=HOST_SIDE)


def letters(explanation: Explanation, policy: str) -> str:
    (view,) = [view for view in explanation.views if view.record.policy == policy]
    return "".join(LETTERS[found.kind] for found in view.findings)


FULL = amounts("4", "4Gi")


@pytest.mark.parametrize(
    ("found", "summed", "overhead"),
    [
        pytest.param(pod(container(limits=amounts("1", "1Gi"))), "aae", "aae", id="no-overhead-at-all"),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi")), overhead=amounts("1", "320Mi")), "ae", "", id="overhead-for-rs"
        ),
        pytest.param(pod(container(limits=amounts("1", "1Gi")), overhead=FULL), "", "", id="ample-overhead"),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi"), requests=amounts("500m", "1Gi")), overhead=FULL),
            "b",
            "b",
            id="cpu-requests-below",
        ),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi"), requests=amounts("500m", "1Mi")), overhead=FULL),
            "bb",
            "bb",
            id="both-requests-below",
        ),
        pytest.param(pod(container()), "c", "c", id="nothing-set"),
        pytest.param(pod(container(), overhead=amounts("1", "320Mi")), "c", "c", id="nothing-set-some-overhead"),
        pytest.param(pod(container(requests=amounts("2", "3Gi"))), "hh", "hh", id="requests-without-limits"),
        pytest.param(pod(container(limits=amounts("8", "1Gi")), overhead=FULL), "d", "d", id="more-cpus-than-the-node"),
        pytest.param(
            pod(container(limits=amounts("1", "15Gi")), overhead=FULL), "d", "", id="more-memory-than-the-node"
        ),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi")), container(limits=amounts("1")), overhead=FULL),
            "f",
            "f",
            id="one-without-a-limit",
        ),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi", hugepages_2Mi="64Mi")), overhead=FULL), "g", "g", id="huge-pages"
        ),
    ],
)
def test_every_disagreement_is_found(found: PodSizing, summed: str, overhead: str) -> None:
    explanation = explained(config(), host(), found)

    assert (letters(explanation, "sum"), letters(explanation, "overhead")) == (summed, overhead)


@pytest.mark.parametrize("policy", ["sum", "overhead"])
@given(cpu=st.integers(0, 6999), memory=st.integers(0, 12 << 30))
def test_the_suggested_overhead_makes_them_agree(policy: str, cpu: int, memory: int) -> None:
    limits = {name: amount for name, amount in (("cpu", Fraction(cpu, 1000)), ("memory", Fraction(memory))) if amount}
    before = pod(container(limits=limits))
    (view,) = [each for each in explained(CONFIG, HOST, before).views if each.record.policy == policy]

    for fixed in (view.pod_fixed, *((view.class_fixed,) if cpu and memory else ())):
        overhead = {"cpu": fixed.cpus, "memory": fixed.memory_mib * MIB}
        assert letters(explained(CONFIG, HOST, replace(before, overhead=overhead)), policy) == ""
    less = {"cpu": view.pod_fixed.cpus - Fraction(1, 1000), "memory": view.pod_fixed.memory_mib * MIB}
    if view.pod_fixed.cpus:
        assert letters(explained(CONFIG, HOST, replace(before, overhead=less)), policy) in ("a", "c")


def test_a_resizable_vm_without_room_to_grow_is_explained_at_its_boot_size() -> None:
    qemu = {"default_maxvcpus": 1, "default_maxmemory": 2048}
    roomless = configured(qemu, {"static_sandbox_resource_mgmt": False})
    found = pod(container(limits=amounts("4", "4Gi")))

    explanation = explained(roomless, host(), found)

    assert explanation.in_force == "dynamic"
    record = explanation.view_in_force.record
    assert (record.vcpus.granted, record.memory_mib.granted) == (1, 2048)


def test_the_advice_for_a_class_does_not_depend_on_the_node() -> None:
    found = pod(container(limits=amounts("4", "8Gi")))
    small, large = (
        explained(config(), host(cpu_count=cpus, memory_mib=mib), found) for cpus, mib in ((2, 4096), (64, 1 << 20))
    )

    for on_small, on_large in zip(small.views, large.views, strict=True):
        assert on_small.pod_fixed == on_large.pod_fixed
    assert [view.record.memory_mib.granted for view in small.views] == [4096, 4096]


def test_the_numbers_are_in_the_sentence() -> None:
    found = pod(container(limits=amounts("1", "1Gi")), overhead=amounts("250m", "320Mi"))

    texts = [each.text for each in explained(config(), host(), found).views[0].findings]

    assert texts == [
        "the VM is sized for 2 CPUs; limits + overhead are 1 + 0.25 = 1.25 CPUs: 0.75 are not accounted for",
        "the VM takes 3072 + 200 MiB (guest RAM + host side); limits + overhead are 1024 + 320 = 1344 MiB: "
        "1928 are not accounted for",
        "the VM takes 3072 + 200 MiB (guest RAM + host side), the pod's cgroup allows 1344: "
        "the host kills a VM that uses more",
    ]
