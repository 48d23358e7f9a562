"""The cost of the dearest reply of each size limit for the event loop, from its bytes to what containerd is answered.

CPU time is compared with a piece of work of the same run, since machines differ: reading a JSON array of 1 MiB.
"""

import json
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import pytest

from protos.agent import agent_pb2 as pb
from pyshim.agent import translate
from pyshim.agent.client import MAX_REPLY_BYTES, MAX_STATS_BYTES
from pyshim.model.host_facts import CgroupMode
from pyshim.model.units import MIB
from pyshim.task import translate_stats
from tests.unit.failpoints.hostile import resident_bytes

TABLES = (
    *("io_service_bytes_recursive", "io_serviced_recursive", "io_queued_recursive", "io_service_time_recursive"),
    *("io_wait_time_recursive", "io_merged_recursive", "io_time_recursive", "sectors_recursive"),
)
MEMORY_BYTES = 32 * MIB
ZEROS = b"[" + b"0," * (1 << 19) + b"0]"


def field(number: int, content: bytes = b"") -> bytes:
    """A field of bytes."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(head) + bytes([size]) + content


def number_of(message: type, name: str) -> int:
    return int(message.DESCRIPTOR.fields_by_name[name].number)  # type: ignore[attr-defined]


CGROUP = number_of(pb.StatsContainerResponse, "cgroup_stats")
ROW = field(number_of(pb.StatsContainerResponse, "network_stats"))
KEYS = [field(number_of(pb.CgroupStats, "hugetlb_stats"), field(1, b"%x" % number)) for number in range(50_000)]
COUNTERS = [field(number_of(pb.MemoryStats, "stats"), field(1, b"%x" % number)) for number in range(50_000)]


def filled(pieces: list[bytes], size_bytes: int) -> bytes:
    """As many whole pieces as fit."""
    sums = list(accumulate(map(len, pieces)))
    return b"".join(pieces[: bisect_right(sums, size_bytes)])


def mixture(size_bytes: int) -> bytes:
    """A thousand rows of every table, and the rest in the keys of one."""
    rows = b"".join(field(number_of(pb.BlkioStats, table)) * 1024 for table in TABLES)
    blkio = field(number_of(pb.CgroupStats, "blkio_stats"), rows)
    memory = field(number_of(pb.CgroupStats, "memory_stats"), filled(COUNTERS, 16 * 1024))
    rest = filled(KEYS, size_bytes - len(blkio) - len(memory) - 1024 * len(ROW) - 16)
    return ROW * 1024 + field(CGROUP, blkio + memory + rest)


STATS: dict[str, Callable[[int], bytes]] = {
    "empty rows": lambda size: ROW * (size // len(ROW)),
    "keys": lambda size: field(CGROUP, filled(KEYS, size - 16)),
    "counters": lambda size: field(
        CGROUP, field(number_of(pb.CgroupStats, "memory_stats"), filled(COUNTERS, size - 16))
    ),
    "empty messages merged": lambda size: field(CGROUP) * (size // 2),
    "unknown fields": lambda size: b"\x70\x00" * (size // 2),
    "a mixture": mixture,
}


def cpu_ms(work: Callable[[], object]) -> float:
    """The least of five: what other programs and the collector add is no part of it."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times) * 1000


@pytest.mark.parametrize("kind", STATS)
@pytest.mark.parametrize("mode", [CgroupMode.V1, CgroupMode.V2])
def test_the_dearest_statistics_cost_no_more_than_two_mib_of_json(kind: str, mode: CgroupMode) -> None:
    payload = STATS[kind](MAX_STATS_BYTES)
    assert MAX_STATS_BYTES * 0.9 < len(payload) <= MAX_STATS_BYTES

    def decoded() -> None:
        stats = translate.container_stats(pb.StatsContainerResponse.FromString(payload))
        translate_stats.metrics(stats, mode)

    reference_ms, took_ms = cpu_ms(lambda: json.loads(ZEROS)), cpu_ms(decoded)
    print(f"{kind}, {mode}: {took_ms:.1f} ms for {len(payload)} bytes; a MiB of JSON takes {reference_ms:.1f} ms")
    assert took_ms <= 2 * reference_ms


@pytest.mark.parametrize("kind", STATS)
def test_the_largest_statistics_hold_little_memory(kind: str) -> None:
    """From the bytes to the answer, all of it in memory at once; without a limit it was 211 MiB, which stayed."""
    payload = STATS[kind](MAX_STATS_BYTES)
    before = resident_bytes()

    message = pb.StatsContainerResponse.FromString(payload)
    stats = translate.container_stats(message)
    answer = translate_stats.metrics(stats, CgroupMode.V2)

    held = resident_bytes() - before
    print(f"{kind}: {held / MIB:.1f} MiB for {len(payload)} bytes")
    assert answer is not None
    assert held < MEMORY_BYTES


def test_any_other_reply_costs_a_fraction_of_that() -> None:
    """Of its size, a reply of empty rows is the dearest one of a plain call."""
    payload = field(1) * (MAX_REPLY_BYTES // 2)
    reference_ms = cpu_ms(lambda: json.loads(ZEROS))
    for reply, read in (
        (pb.VolumeStatsResponse, lambda: translate.volume_stats(pb.VolumeStatsResponse.FromString(payload))),
        (pb.ReadStreamResponse, lambda: translate.stream_data(payload)),
    ):
        took_ms = cpu_ms(read)
        print(f"{reply.DESCRIPTOR.name}: {took_ms:.1f} ms for {len(payload)} bytes")
        assert took_ms <= reference_ms / 4
