"""Pods counted as Kubernetes counts them, and where a VM and Kubernetes disagree."""

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HostFacts
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import LETTERS, Explanation, explain_pod
from pyshim.node.kubernetes.pod_size import PodContainer, PodSizing, with_defaults
from pyshim.node.kubernetes.quantity import cpu_text, memory_text, quantity
from tests.fakes.facts import host_facts
from tests.fakes.inputs import config, configured, host

HOST_SIDE = 200
CONFIG = build_config(Source(path="t", directory="/", document={"hypervisor": {"qemu": {}}}))
HOST = host_facts()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"),
        ("1", "1"),
        ("250m", "1/4"),
        ("1.5", "3/2"),
        ("0.1", "1/10"),
        (".5", "1/2"),
        ("1.", "1"),
        ("+2", "2"),
        ("-0", "0"),
        ("100u", "1/10000"),
        ("7n", "7/1000000000"),
        ("1k", "1000"),
        ("128M", "128000000"),
        ("1G", "1000000000"),
        ("2T", "2000000000000"),
        ("1P", "1000000000000000"),
        ("1E", "1000000000000000000"),
        ("1Ki", "1024"),
        ("512Mi", "536870912"),
        ("1.5Gi", "1610612736"),
        ("1Ti", "1099511627776"),
        ("1Pi", "1125899906842624"),
        ("1Ei", "1152921504606846976"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1.5e-3", "3/2000"),
        ("12E+2", "1200"),
        ("0.1Ki", "512/5"),
    ],
)
def test_quantities_are_exact(text: str, value: str) -> None:
    assert quantity(text, "x") == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1 Gi", "1GiB", "1K", "1mi", "Gi", "1e", "e3", "1e3m", "1e999999999", "1m3", "--1", "-1", "-1m"),
        *("0x10", "1_000", "nan", "inf", "1,5", "٣", "1" * 65, "1\n"),
    ],
)
def test_a_malformed_quantity_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"read limits\.cpu: (not a quantity|unknown suffix|negative)"):
        quantity(text, "limits.cpu")


@pytest.mark.parametrize(
    ("cpus", "text"),
    [("1/4", "250m"), ("2", "2"), ("3/2", "1500m"), ("1/3", "334m"), ("0", "0"), ("1999/2000", "1000m")],
)
def test_cpus_are_written_in_whole_milli_cpus_never_too_few(cpus: str, text: str) -> None:
    assert cpu_text(Fraction(cpus)) == text
    assert memory_text(Fraction(1, 3)) == "1Mi"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1/2", "0.5"),
        ("1/3", "~0.333"),
        ("2/3", "~0.667"),
        ("-1/2", "-0.5"),
        ("10", "10"),
        ("1/100000", "~0"),
        ("0.125", "0.125"),
    ],
)
def test_decimals_say_when_they_are_not_all(value: str, text: str) -> None:
    assert decimal(Fraction(value)) == text
    assert decimal(Fraction(10) ** 400).startswith("1000")


def amounts(cpu: str = "", memory: str = "", **others: str) -> dict[str, Fraction]:
    named = {"cpu": cpu, "memory": memory, **{name.replace("_", "-"): text for name, text in others.items()}}
    return {name: quantity(text, name) for name, text in named.items() if text}


def container(
    name: str = "c", limits: dict[str, Fraction] | None = None, requests: dict[str, Fraction] | None = None, **more: Any
) -> PodContainer:
    limited = limits or {}
    return PodContainer(name=name, limits=limited, requests=with_defaults(requests or {}, limited), **more)


def pod(*containers: PodContainer, init: tuple[PodContainer, ...] = (), **more: Any) -> PodSizing:
    fields: dict[str, Any] = {"requests": {}, "limits": {}, "overhead": {}, **more}
    return PodSizing(containers=containers, init_containers=init, **fields)


def limited(cpu: str, **more: Any) -> PodContainer:
    return container(limits=amounts(cpu), **more)


def test_the_overhead_is_reserved_and_is_part_of_the_cgroups_limit_but_not_of_the_shims_annotations() -> None:
    found = pod(container(limits=amounts("1", "1Gi")), overhead=amounts("250m", "320Mi"))

    assert found.reserved() == amounts("1250m", "1344Mi")
    assert found.cgroup_limit("memory") == 1344 * MIB
    assert found.sandbox_annotations() == {
        "io.kubernetes.cri.sandbox-cpu-period": "100000",
        "io.kubernetes.cri.sandbox-cpu-quota": "100000",
        "io.kubernetes.cri.sandbox-cpu-shares": "1024",
        "io.kubernetes.cri.sandbox-memory": str(1 << 30),
    }


@pytest.mark.parametrize(
    ("cpu", "quota", "shares"),
    [
        ("", "0", "2"),
        ("1m", "1000", "2"),
        ("10m", "1000", "10"),
        ("11m", "1100", "11"),
        ("1.1", "110000", "1126"),
        ("0.0001", "1000", "2"),
        ("1.00001", "100100", "1025"),
    ],
)
def test_kubelet_tells_quota_and_shares(cpu: str, quota: str, shares: str) -> None:
    annotations = pod(container(limits=amounts(cpu))).sandbox_annotations()

    assert (
        annotations["io.kubernetes.cri.sandbox-cpu-quota"],
        annotations["io.kubernetes.cri.sandbox-cpu-shares"],
    ) == (quota, shares)


@pytest.mark.parametrize(
    ("found", "guaranteed"),
    [
        pytest.param(pod(container(limits=amounts("1", "1Gi"))), True, id="limits"),
        pytest.param(pod(container(limits=amounts("1", "1Gi"), requests=amounts("900m"))), False, id="requests-below"),
        pytest.param(pod(container(limits=amounts("1", "1Gi")), container()), False, id="one-without"),
        pytest.param(pod(limited("2")), False, id="no-memory"),
        pytest.param(
            pod(container(limits=amounts("1", "1Gi")), init=(container(limits=amounts("1", "1Gi")),)), True, id="init"
        ),
        pytest.param(pod(container(limits=amounts("1", "1Gi")), init=(container(),)), False, id="init-without"),
        pytest.param(pod(container(), limits=amounts("1", "1Gi")), True, id="of-the-pod"),
        pytest.param(
            pod(container(), limits=amounts("1", "1Gi"), requests=amounts("500m")), False, id="requests-of-the-pod"
        ),
        pytest.param(pod(container()), False, id="nothing"),
    ],
)
def test_a_pod_is_guaranteed_that_requests_all_it_may_use(found: PodSizing, guaranteed: bool) -> None:
    assert found.is_guaranteed() is guaranteed


def test_a_container_without_limit_leaves_the_pods_cgroup_without_one() -> None:
    found = pod(container("a", limits=amounts("1", "1Gi")), container("b", limits=amounts("1")))

    assert found.cgroup_limit("cpu") == 2
    assert found.cgroup_limit("memory") is None
    assert found.unlimited("memory") == ("b",)
    assert replace(found, limits=amounts(memory="2Gi")).cgroup_limit("memory") == 2048 * MIB


small = st.fractions(0, 8, max_denominator=1000)


@given(st.lists(small, min_size=1, max_size=6), st.integers(0, 1000))
def test_the_order_of_containers_does_not_matter(cpus: list[Fraction], seed: int) -> None:
    containers = [container(str(index), limits={"cpu": cpu}) for index, cpu in enumerate(cpus)]
    shuffled = list(containers)
    random.Random(seed).shuffle(shuffled)

    assert pod(*containers).sandbox_annotations() == pod(*shuffled).sandbox_annotations()
    assert pod(*containers).effective_limits()["cpu"] == sum(cpus)


# ---- agreement


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
