"""A pod's or container's request: which figure counts, and the error for a malformed one."""

from fractions import Fraction
from typing import Any

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.oci import ContainerKind
from pyshim.model.units import MIB
from pyshim.resources.sizing.plan.workload import workload

POD = "io.kubernetes.cri.sandbox-"
BY_QUOTA, BY_SHARES = f"annotations {POD}cpu-quota, -cpu-period", f"annotation {POD}cpu-shares, quota off"


@pytest.mark.parametrize(
    ("quota", "period", "shares", "vcpus", "source"),
    [
        pytest.param("50000", "100000", "512", "1/2", BY_QUOTA, id="half"),
        pytest.param("100", "100000", "2", "1/1000", BY_QUOTA, id="1m"),
        pytest.param("10000", "30000", "2", "1/3", BY_QUOTA, id="a-third"),
        pytest.param("0", "100000", "2048", "0", "no CPU limit", id="no-limit-shares-are-no-limit"),
        pytest.param("0", "0", "2", "0", "no CPU limit", id="zero"),
        pytest.param("-1", "100000", "2048", "2", BY_SHARES, id="exclusive-2"),
        pytest.param("-1", "100000", "3174", "31/10", BY_SHARES, id="3100m-as-kubelet-truncates-it"),
        pytest.param("-1", "0", "1024", "1", BY_SHARES, id="no-period-needed"),
        pytest.param("0", "0", "2048", "2", BY_SHARES, id="cpuCFSQuota-is-false"),
    ],
)
def test_a_pods_cpus_come_from_quota_or_from_shares_when_the_quota_is_off(
    quota: str, period: str, shares: str, vcpus: str, source: str
) -> None:
    annotations = {f"{POD}cpu-quota": quota, f"{POD}cpu-period": period, f"{POD}cpu-shares": shares}

    asked = workload(ContainerKind.POD_SANDBOX, annotations, {})

    assert (asked.vcpus, asked.vcpus_source) == (Fraction(vcpus), source)


def test_a_kubelet_without_quotas_is_named() -> None:
    asked = workload(ContainerKind.POD_SANDBOX, {f"{POD}cpu-quota": "0", f"{POD}cpu-period": "0"} | SHARES, {})
    limited = workload(ContainerKind.POD_SANDBOX, {f"{POD}cpu-quota": "-1", f"{POD}cpu-period": "0"} | SHARES, {})

    assert asked.warnings == (
        "the kubelet sets no CPU quotas (cpuCFSQuota: false), so vCPUs are those of the pod's CPU requests",
    )
    assert limited.warnings == ()


SHARES = {f"{POD}cpu-shares": "2048"}
CRIO = {"io.kubernetes.cri-o.ContainerType": "sandbox"}
CRIO_NEW, CRIO_OLD = "pod-linux-resources.crio.io", "io.kubernetes.cri-o.PodLinuxResources"
ONE_AND_A_HALF = '{"cpu_period":100000,"cpu_quota":150000,"cpu_shares":512,"memory_limit_in_bytes":1073741824}'


@pytest.mark.parametrize("key", [CRIO_NEW, CRIO_OLD])
def test_a_pod_of_crio_has_the_size_of_its_json_and_not_that_of_its_own_annotations(key: str) -> None:
    forged = {f"{POD}cpu-quota": "6400000", f"{POD}cpu-period": "100000", f"{POD}memory": str(64 << 30)}

    asked = workload(ContainerKind.POD_SANDBOX, {**CRIO, **forged, key: ONE_AND_A_HALF}, {})

    assert (asked.vcpus, asked.memory_bytes) == (Fraction(3, 2), 1 << 30)
    assert asked.vcpus_source == f"annotation {key} cpu_quota/cpu_period"
    assert asked.memory_source == f"annotation {key} memory_limit_in_bytes"


def test_a_pod_of_containerd_does_not_take_its_size_from_crios_keys() -> None:
    annotations = {"io.kubernetes.cri.container-type": "sandbox", CRIO_NEW: ONE_AND_A_HALF}

    assert workload(ContainerKind.POD_SANDBOX, annotations, {}).vcpus == 0


@pytest.mark.parametrize(
    ("text", "vcpus", "memory_bytes"),
    [
        pytest.param('{"cpu_quota":-1,"cpu_period":100000,"cpu_shares":2048}', "2", 0, id="exclusive-cpus"),
        pytest.param('{"cpu_shares":2,"hugepage_limits":[{"page_size":"2Mi"}]}', "0", 0, id="best-effort"),
        pytest.param('{"memory_limit_in_bytes":-1}', "0", 0, id="negative-memory-is-no-limit"),
        pytest.param('{"memory_limit_in_bytes":9223372036854771712}', "0", 0, id="the-kernels-no-limit"),
        pytest.param("null", "0", 0, id="null"),
        pytest.param("{}", "0", 0, id="empty"),
    ],
)
def test_figures_that_crio_leaves_out_are_no_limit(text: str, vcpus: str, memory_bytes: int) -> None:
    asked = workload(ContainerKind.POD_SANDBOX, {**CRIO, CRIO_NEW: text}, {})

    assert (asked.vcpus, asked.memory_bytes) == (Fraction(vcpus), memory_bytes)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", '"x"', "\ud800", "[" * 100_000, '{"cpu_quota":"1"}', '{"cpu_quota":1.5}'),
        *('{"cpu_quota":100000}', '{"memory_limit_in_bytes":18446744073709551616}', '{"cpu_shares":-1e400}'),
    ],
    ids=lambda text: text[:24] or "empty",
)
def test_a_malformed_size_of_crio_is_refused_by_the_annotations_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"read annotation .?{CRIO_NEW}"):
        workload(ContainerKind.POD_SANDBOX, {**CRIO, CRIO_NEW: text}, {})


def test_two_sizes_of_crio_that_contradict_are_refused() -> None:
    """A release writes one of the keys; the other one could be the pod's own."""
    annotations = {**CRIO, CRIO_NEW: ONE_AND_A_HALF, CRIO_OLD: "{}"}

    with pytest.raises(InvalidArgument, match=f"{CRIO_NEW}' and '{CRIO_OLD}'"):
        workload(ContainerKind.POD_SANDBOX, annotations, {})
    assert workload(ContainerKind.POD_SANDBOX, {**annotations, CRIO_OLD: ONE_AND_A_HALF}, {}).vcpus == Fraction(3, 2)


@pytest.mark.parametrize("milli", [*range(3, 2000, 7), 999, 1000, 1001, 4001, 63_999, 64_000])
def test_the_milli_cpus_behind_kubelets_shares_are_found_again(milli: int) -> None:
    shares = max(2, milli * 1024 // 1000)
    annotations = {f"{POD}cpu-quota": "-1", f"{POD}cpu-period": "100000", f"{POD}cpu-shares": str(shares)}

    assert workload(ContainerKind.POD_SANDBOX, annotations, {}).vcpus == Fraction(milli, 1000)


@pytest.mark.parametrize(
    ("cpu", "vcpus", "source"),
    [
        pytest.param({"quota": 25000, "period": 100000}, "1/4", "linux.resources.cpu quota/period", id="quota"),
        pytest.param({"quota": 50000}, "1/2", "linux.resources.cpu quota/period", id="the-kernels-period"),
        pytest.param({"cpus": "0-3"}, "4", "linux.resources.cpu.cpus", id="cpuset"),
        pytest.param({"cpus": "0,2, 5-6"}, "4", "linux.resources.cpu.cpus", id="cpuset-list"),
        pytest.param(
            {"quota": 150000, "period": 100000, "cpus": "0-3"},
            "3/2",
            "linux.resources.cpu quota/period",
            id="quota-before-cpuset",
        ),
        pytest.param({"quota": -1, "shares": 2048, "cpus": "0-3"}, "4", "linux.resources.cpu.cpus", id="cpuset-first"),
        pytest.param({"quota": -1, "shares": 2048}, "2", "linux.resources.cpu.shares, quota off", id="shares"),
        pytest.param({"shares": 2048}, "0", "no CPU limit", id="shares-alone-are-a-weight"),
        pytest.param({"quota": -1, "period": 100000}, "0", "no CPU limit", id="off"),
        pytest.param({"quota": 0, "period": 100000}, "0", "no CPU limit", id="zero"),
    ],
)
def test_a_single_containers_cpus(cpu: dict[str, Any], vcpus: str, source: str) -> None:
    spec = {"linux": {"resources": {"cpu": cpu}}}

    asked = workload(ContainerKind.SINGLE_CONTAINER, {}, spec)

    assert (asked.vcpus, asked.vcpus_source) == (Fraction(vcpus), source)


@pytest.mark.parametrize(
    ("resources", "memory", "hugepages", "source"),
    [
        pytest.param({"memory": {"limit": 7}}, 7, 0, "linux.resources.memory.limit", id="limit"),
        pytest.param({"memory": {"limit": 9223372036854771712}}, 0, 0, "no memory limit", id="page-counter-max"),
        pytest.param({"memory": {"reservation": 5}}, 0, 0, "no memory limit", id="a-reservation-is-no-limit"),
        pytest.param(
            {"memory": {"limit": 7}, "hugepageLimits": [{"pageSize": "2MB", "limit": 4 * MIB}]},
            7,
            4 * MIB,
            "linux.resources.memory.limit + hugepageLimits",
            id="with-huge-pages",
        ),
        pytest.param(None, 0, 0, "no memory limit", id="null"),
    ],
)
def test_a_single_containers_memory(resources: dict[str, Any] | None, memory: int, hugepages: int, source: str) -> None:
    asked = workload(ContainerKind.SINGLE_CONTAINER, {}, {"linux": {"resources": resources}})

    assert (asked.memory_bytes, asked.hugepage_bytes, asked.memory_source) == (memory, hugepages, source)


def test_a_pods_own_spec_is_not_its_size() -> None:
    """The sandbox container is the pause container: its own resources say nothing about the pod."""
    spec = {"linux": {"resources": {"cpu": {"quota": 25000, "period": 100000}, "memory": {"limit": 7}}}}

    asked = workload(ContainerKind.POD_SANDBOX, {f"{POD}memory": str(300 * MIB)}, spec)

    assert (asked.vcpus, asked.memory_bytes) == (0, 300 * MIB)
    assert (asked.vcpus_source, asked.memory_source) == ("no CPU limit", f"annotation {POD}memory")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("memory", "1Gi", "'1Gi'"),
        ("memory", "", "''"),
        ("memory", "٣", "whole number"),
        ("memory", "9" * 5000, "9999"),
        ("memory", "99999999999999999999", "64 bits"),
        ("cpu-quota", "50000", "without a period"),
    ],
)
def test_an_annotation_that_is_no_number_is_named(name: str, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        workload(ContainerKind.POD_SANDBOX, {POD + name: text}, {})

    assert f"{POD}{name}" in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("resources", "named"),
    [
        ({"cpu": {"quota": "1"}}, r"linux\.resources\.cpu\.quota is not a whole number: '1'"),
        ({"cpu": {"quota": 1 << 70}}, r"linux\.resources\.cpu\.quota: out of range"),
        ({"cpu": {"quota": 5, "period": -1}}, r"linux\.resources\.cpu\.period is negative"),
        ({"cpu": {"cpus": "0-4294967295"}}, r"linux\.resources\.cpu\.cpus"),
        ({"cpu": {"cpus": "1-"}}, r"linux\.resources\.cpu\.cpus.*'1-'"),
        ({"cpu": []}, None),
        ({"cpu": [1]}, r"linux\.resources\.cpu is not an object"),
        ({"memory": {"limit": "1Gi"}}, r"linux\.resources\.memory\.limit"),
        ({"hugepageLimits": {"a": 1}}, r"hugepageLimits is not a list"),
        ({"hugepageLimits": [{"limit": "x"}]}, r"hugepageLimits\.limit"),
    ],
)
def test_a_member_that_is_no_number_is_named(resources: dict[str, Any], named: str | None) -> None:
    spec = {"linux": {"resources": resources}}
    if named is None:
        assert workload(ContainerKind.SINGLE_CONTAINER, {}, spec).vcpus == 0
        return
    with pytest.raises(InvalidArgument, match=named):
        workload(ContainerKind.SINGLE_CONTAINER, {}, spec)
