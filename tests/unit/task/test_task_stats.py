"""Statistics of either kind of guest, in the message of either kind of host."""

from typing import Any

import pytest
from fake_sandboxes import some_stats
from msgspec.structs import replace

from protos.cgroups import v1_pb2, v2_pb2
from pyshim.model.host_facts import CgroupMode
from pyshim.task.translate_stats import metrics

V1_GUEST = {
    "cache": 1,
    "rss": 2,
    "mapped_file": 3,
    "pgpgin": 4,
    "pgfault": 5,
    "pgmajfault": 6,
    "inactive_file": 7,
    "total_cache": 101,
    "total_rss": 102,
    "total_mapped_file": 103,
    "total_pgpgin": 104,
    "total_pgfault": 105,
    "total_pgmajfault": 106,
    "total_inactive_file": 107,
    "hierarchical_memsw_limit": 108,
}
V2_GUEST = {"anon": 201, "file": 202, "file_mapped": 203, "pgfault": 204, "pgmajfault": 205, "inactive_file": 206}


def v1(detail: dict[str, int]) -> v1_pb2.Metrics:
    return v1_pb2.Metrics.FromString(metrics(some_stats(detail), CgroupMode.V1).value)


def v2(detail: dict[str, int]) -> v2_pb2.Metrics:
    return v2_pb2.Metrics.FromString(metrics(some_stats(detail), CgroupMode.V2).value)


def set_fields(message: Any) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def test_v1_message_has_every_number_in_its_place() -> None:
    m = v1({})

    assert m.cpu == v1_pb2.CPUStat(
        usage=v1_pb2.CPUUsage(total=9_000_000, kernel=4_000_000, user=5_000_000, per_cpu=[6_000_000, 3_000_000]),
        throttling=v1_pb2.Throttle(periods=11, throttled_periods=12, throttled_time=13_000),
    )
    assert m.memory.usage == v1_pb2.MemoryEntry(usage=22, max=23, failcnt=24, limit=2**63 - 4096), "v1's no limit"
    assert m.memory.swap == v1_pb2.MemoryEntry(usage=26, max=27, failcnt=28, limit=29)
    assert m.memory.kernel == v1_pb2.MemoryEntry(usage=30, max=31, failcnt=32, limit=33)
    assert m.memory.HasField("kernel_tcp"), "CRI-O reads it without a check"
    assert m.memory.cache == 21
    assert m.pids == v1_pb2.PidsStat(current=41, limit=42)
    assert [(e.major, e.minor, e.op, e.value) for e in m.blkio.io_service_bytes_recursive] == [
        (8, 0, "Read", 51),
        (8, 0, "Write", 52),
        (8, 16, "read", 53),
        (8, 0, "Total", 103),
    ]
    assert [e.value for e in m.blkio.io_serviced_recursive] == [54]
    assert list(m.hugetlb) == [v1_pb2.HugetlbStat(usage=61, max=62, failcnt=63, pagesize="2MB")]


def test_v2_message_has_every_number_in_its_place() -> None:
    m = v2({})

    assert m.cpu == v2_pb2.CPUStat(
        usage_usec=9000, user_usec=5000, system_usec=4000, nr_periods=11, nr_throttled=12, throttled_usec=13
    )
    assert set_fields(m.memory) == {
        "file": 21,
        "usage": 22,
        "max_usage": 23,
        "usage_limit": 2**63,
        "swap_usage": 4,
        "swap_max_usage": 27,
        "swap_limit": 29,
    }
    assert m.pids == v2_pb2.PidsStat(current=41, limit=42)
    assert list(m.io.usage) == [
        v2_pb2.IOEntry(major=8, minor=0, rbytes=51, wbytes=52),
        v2_pb2.IOEntry(major=8, minor=16, rbytes=53, wios=54),
    ]
    assert list(m.hugetlb) == [v2_pb2.HugeTlbStat(current=61, max=62, pagesize="2MB", failcnt=63)]


@pytest.mark.parametrize(
    ("memory", "swap", "alone"),
    [
        ((100, 200), (150, 500), (50, 300)),
        ((100, 200), (100, 200), (0, 0)),
        ((100, 200), (30, 90), (30, 90)),
        ((100, 2**64 - 1), (150, 2**64 - 1), (50, 2**64 - 1)),
    ],
    ids=["sum of both", "none swapped", "swap alone", "no limit"],
)
def test_v2_host_counts_swap_without_memory(
    memory: tuple[int, int], swap: tuple[int, int], alone: tuple[int, int]
) -> None:
    stats = some_stats({})
    usage = replace(stats.memory.usage, usage_bytes=memory[0], limit_bytes=memory[1])
    both = replace(stats.memory.swap, usage_bytes=swap[0], limit_bytes=swap[1])
    stats = replace(stats, memory=replace(stats.memory, usage=usage, swap=both))

    found = v2_pb2.Metrics.FromString(metrics(stats, CgroupMode.V2).value).memory

    assert (found.swap_usage, found.swap_limit) == alone


def test_oom_kills_are_where_containerd_looks() -> None:
    stats = replace(some_stats({}), oom_kills=2)

    assert v1_pb2.Metrics.FromString(metrics(stats, CgroupMode.V1).value).memory_oom_control.oom_kill == 2
    assert v2_pb2.Metrics.FromString(metrics(stats, CgroupMode.V2).value).memory_events.oom_kill == 2


def test_v1_host_with_a_v1_guest_takes_plain_and_total_lines_apart() -> None:
    memory = v1(V1_GUEST).memory

    plain = (memory.cache, memory.rss, memory.mapped_file, memory.pg_pg_in, memory.pg_fault, memory.inactive_file)
    assert plain == (1, 2, 3, 4, 5, 7)
    assert (memory.total_cache, memory.total_rss, memory.total_mapped_file) == (101, 102, 103)
    assert (memory.total_pg_pg_in, memory.total_pg_fault, memory.total_pg_maj_fault) == (104, 105, 106)
    assert (memory.total_inactive_file, memory.hierarchical_swap_limit) == (107, 108)


def test_v1_host_with_a_v2_guest_finds_the_numbers_kubelet_needs() -> None:
    memory = v1(V2_GUEST).memory

    assert (memory.total_rss, memory.total_cache, memory.total_mapped_file) == (201, 202, 203)
    assert (memory.total_pg_fault, memory.total_pg_maj_fault, memory.total_inactive_file) == (204, 205, 206)


def test_v2_host_with_a_v1_guest_counts_descendants() -> None:
    memory = v2(V1_GUEST).memory

    assert (memory.anon, memory.file, memory.file_mapped) == (102, 101, 103)
    assert (memory.pgfault, memory.pgmajfault, memory.inactive_file) == (105, 106, 107)


def test_v2_host_with_a_v2_guest_takes_lines_by_their_names() -> None:
    memory = set_fields(v2(V2_GUEST).memory)

    assert {name: memory[name] for name in V2_GUEST} == V2_GUEST


@pytest.mark.parametrize("mode", [CgroupMode.V1, CgroupMode.V2])
def test_line_of_an_unknown_name_or_that_of_another_field_changes_nothing(mode: CgroupMode) -> None:
    odd = {"unheard_of": 1, "psi": 2, "usage_": 3}

    assert metrics(some_stats(odd), mode) == metrics(some_stats({}), mode)


def test_line_of_the_guest_cannot_pose_as_the_usage() -> None:
    assert v2({"usage": 999, "total_usage": 998}).memory.usage == 22
