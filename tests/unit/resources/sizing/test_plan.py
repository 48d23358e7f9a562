"""The size a VM boots with, case by case: exact sums, one rounding, the limits, both policies."""

from fractions import Fraction
from math import ceil
from typing import Any

import pytest

from pyshim.model.units import GIB, MIB
from pyshim.resources.sizing.plan.static import boot_size, headroom, static_size, template_size
from pyshim.resources.sizing.plan.workload import Workload
from tests.fakes.inputs import config, configured, host


def request(vcpus: str = "0", memory_bytes: int = 0, hugepage_bytes: int = 0) -> Workload:
    return Workload(
        vcpus=Fraction(vcpus),
        vcpus_source="test",
        memory_bytes=memory_bytes,
        memory_source="test",
        hugepage_bytes=hugepage_bytes,
    )


# The same pod under both policies, with the figures Kata's runtimes come to: (cpu, MiB) -> sum; overhead.
# kata_rs is None where runtime-rs agrees with us, else what it does: a dimension without a limit gets its overhead
# only, and odd MiB are made even.
POLICY_CASES = [
    pytest.param("0", 0, (1, 2048), (1, 2048), None, id="nothing"),
    pytest.param("1", 0, (2, 2048), (2, 2048), (2, 32), id="1cpu-only"),
    pytest.param("0.5", 256, (2, 2304), (1, 288), None, id="half-256Mi"),
    pytest.param("0.8", 224, (2, 2272), (1, 256), None, id="fills-one-cpu"),
    pytest.param("0.801", 225, (2, 2273), (2, 257), (2, 258), id="just-over-one-cpu"),
    pytest.param("4", 8192, (5, 10240), (5, 8224), None, id="4cpu-8Gi"),
    pytest.param("0.001", 1, (2, 2049), (1, 128), (1, 34), id="tiny"),
]


@pytest.mark.parametrize("policy", ["sum", "overhead"])
@pytest.mark.parametrize(("cpu", "mib", "summed", "overhead", "kata_rs"), POLICY_CASES)
def test_the_policies_size_the_same_pod(
    policy: str, cpu: str, mib: int, summed: tuple[int, int], overhead: tuple[int, int], kata_rs: tuple[int, int] | None
) -> None:
    asked = request(cpu, mib * MIB)

    sized = static_size(configured(runtime={"sizing_policy": policy}), host(), asked)

    expected = summed if policy == "sum" else overhead
    assert (sized.policy, (sized.vcpus.granted, sized.memory_mib.granted)) == (policy, expected)
    if policy == "overhead":
        assert runtime_rs(asked) == (kata_rs or overhead)


@pytest.mark.parametrize(
    ("base", "asked", "said"),
    [
        (-1, "0", "6 (default_vcpus) + 0 (test) = 6 -> 6 vCPU"),
        (-1, "2", "6 (default_vcpus) + 2 (test) = 8 -> 8 vCPU, limited to 6 by the host's CPUs"),
        (4095, "0", "4095 (default_vcpus) + 0 (test) = 4095 -> 4095 vCPU, limited to 6 by the host's CPUs"),
    ],
)
def test_all_of_the_hosts_cpus_and_more_are_those_the_host_has(base: int, asked: str, said: str) -> None:
    chosen, six = configured({"default_vcpus": base}), host(cpu_count=6)

    sized = static_size(chosen, six, request(asked))

    assert sized.vcpus.explain("vCPU") == said
    assert boot_size(chosen, six).vcpus.granted == 6


def runtime_rs(asked: Workload) -> tuple[int, int]:
    """Kata's runtime-rs: with any limit, both dimensions are overhead + workload."""
    if not asked.vcpus and not asked.memory_bytes:
        return 1, 2048
    mib = asked.memory_bytes // MIB
    return ceil(max(Fraction(1), Fraction(1, 5) + asked.vcpus)), 32 + mib + mib % 2


@pytest.mark.parametrize(
    ("keys", "asked", "base", "source"),
    [
        pytest.param({}, request("1", MIB), ("1/5", "32"), ("overhead_vcpus", "overhead_memory"), id="both"),
        pytest.param({}, request("1"), ("1/5", "2048"), ("overhead_vcpus", "default_memory"), id="cpu-only"),
        pytest.param(
            {}, request(memory_bytes=MIB), ("1", "32"), ("default_vcpus", "overhead_memory"), id="memory-only"
        ),
        pytest.param({}, request(), ("1", "2048"), ("default_vcpus", "default_memory"), id="neither"),
    ],
)
def test_policy_overhead_decides_each_dimension_by_itself(
    keys: dict[str, Any], asked: Workload, base: tuple[str, str], source: tuple[str, str]
) -> None:
    sized = static_size(configured(qemu=keys, runtime={"sizing_policy": "overhead"}), host(), asked)

    assert (sized.vcpus.base, sized.memory_mib.base) == tuple(map(Fraction, base))
    assert (sized.vcpus.base_source, sized.memory_mib.base_source) == source


# keys, host, asked -> (vCPUs wanted, given, by), (MiB wanted, given, by)
BY_HOST_CPUS, BY_HOST_MEMORY = "the host's CPUs", "the host's memory"
LIMITS = [
    pytest.param({}, {"cpu_count": 2}, request("5"), (6, 2, BY_HOST_CPUS), (2048, 2048, ""), id="small-host"),
    pytest.param(
        {"default_maxvcpus": 4}, {}, request("3.5"), (5, 4, "default_maxvcpus"), (2048, 2048, ""), id="max-four"
    ),
    pytest.param(
        {"default_maxmemory": 3000},
        {},
        request(memory_bytes=GIB),
        (1, 1, ""),
        (3072, 3000, "default_maxmemory"),
        id="maxmemory",
    ),
    pytest.param(
        {},
        {"memory_mib": 0},
        request(memory_bytes=1 << 50),
        (1, 1, ""),
        (2048 + (1 << 30), 2048 + (1 << 30), ""),
        id="host-memory-unknown",
    ),
    pytest.param(
        {"enable_hugepages": True}, {}, request(memory_bytes=MIB), (1, 1, ""), (2050, 2050, ""), id="whole-huge-pages"
    ),
]


@pytest.mark.parametrize(("keys", "facts", "asked", "vcpus", "memory"), LIMITS)
def test_what_limits_the_size_is_named(
    keys: dict[str, Any],
    facts: dict[str, Any],
    asked: Workload,
    vcpus: tuple[int, int, str],
    memory: tuple[int, int, str],
) -> None:
    sized = static_size(config(**keys), host(**facts), asked)

    assert (sized.vcpus.rounded, sized.vcpus.granted, sized.vcpus.limited_by) == vcpus
    assert (sized.memory_mib.rounded, sized.memory_mib.granted, sized.memory_mib.limited_by) == memory


def test_huge_pages_are_memory_beside_the_limit() -> None:
    sized = static_size(config(), host(), request(memory_bytes=GIB, hugepage_bytes=512 * MIB))

    assert (sized.memory_mib.requested, sized.memory_mib.granted) == (1536, 3584)


@pytest.mark.parametrize("confidential", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_only_a_vm_that_may_change_later_gets_room_to_grow(static: bool, confidential: bool) -> None:
    keys = {"confidential_guest": confidential}
    config = configured(qemu=keys, runtime={"static_sandbox_resource_mgmt": static})
    sized = static_size(config, host(), request("1", GIB))

    room = headroom(config, host(), sized)

    grows = not static and not confidential
    assert (room.max_vcpus, room.max_memory_mib, room.memory_slots) == ((8, 16384, 10) if grows else (2, 3072, 0))


@pytest.mark.parametrize(
    ("static", "policy", "vcpus", "mib"),
    [(False, "overhead", 2, 1024), (True, "sum", 2, 1024), (True, "overhead", 1, 256)],
)
def test_a_template_is_no_larger_than_the_pods_it_is_for(static: bool, policy: str, vcpus: int, mib: int) -> None:
    runtime = {"sizing_policy": policy, "static_sandbox_resource_mgmt": static}
    sized = template_size(configured(qemu={"default_vcpus": 2, "default_memory": 1024}, runtime=runtime), host())

    assert (sized.vcpus.granted, sized.memory_mib.granted) == (vcpus, mib)
