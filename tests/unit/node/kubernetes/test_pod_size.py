"""Pods counted as Kubernetes counts them."""

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.pod_size import PodContainer, PodSizing, cpu_text, memory_text, quantity, with_defaults


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


def test_a_kubelet_without_quotas_tells_only_shares_and_limits_no_cpus() -> None:
    found = pod(container(limits=amounts("2", "1Gi"), requests=amounts("500m", "1Gi")), has_quotas=False)

    assert found.sandbox_annotations() == {
        "io.kubernetes.cri.sandbox-cpu-period": "0",
        "io.kubernetes.cri.sandbox-cpu-quota": "0",
        "io.kubernetes.cri.sandbox-cpu-shares": "512",
        "io.kubernetes.cri.sandbox-memory": str(1 << 30),
    }
    assert (found.cgroup_limit("cpu"), found.cgroup_limit("memory")) == (None, 1 << 30)


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
