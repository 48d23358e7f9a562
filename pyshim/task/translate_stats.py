"""A container's statistics as containerd's metrics messages, in the form of the host's cgroup version.

The guest has a cgroup version of its own, which names the lines of its memory.stat. So each field is looked up by all
names that its number can have.
"""

from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from msgspec.structs import replace

from protos.cgroups import v1_pb2, v2_pb2
from pyshim.model.guest import BlockIoStats, ContainerStats, MemoryStats, MemoryUse
from pyshim.model.host_facts import CgroupMode

_NS_PER_US = 1000
_UNLIMITED_FROM = 1 << 62
"""Bytes from which a limit means none: the kernel writes the largest number of pages in bytes."""
_V1_UNLIMITED = (1 << 63) - (1 << 12)
"""The number that cgroup v1 shows for no limit, with pages of 4 KiB; readers of v1 metrics compare with it."""

# Fields of the v1 message and the other names of their lines in memory.stat; the first one found is used. A v2 guest
# counts a cgroup with its descendants, as the lines total_ of v1 do.
_V1_ALIASES = {
    "rss": ("anon",),
    "cache": ("file",),
    "rss_huge": ("anon_thp",),
    "mapped_file": ("file_mapped",),
    "dirty": ("file_dirty",),
    "writeback": ("file_writeback",),
    "pg_pg_in": ("pgpgin",),
    "pg_pg_out": ("pgpgout",),
    "pg_fault": ("pgfault",),
    "pg_maj_fault": ("pgmajfault",),
    "hierarchical_swap_limit": ("hierarchical_memsw_limit",),
}
_V2_ALIASES = {
    "anon": ("total_rss", "rss"),
    "file": ("total_cache", "cache"),
    "anon_thp": ("total_rss_huge", "rss_huge"),
    "file_mapped": ("total_mapped_file", "mapped_file"),
    "file_dirty": ("total_dirty", "dirty"),
    "file_writeback": ("total_writeback", "writeback"),
    "shmem": ("total_shmem",),
    "workingset_refault": ("workingset_refault_file",),
    "workingset_activate": ("workingset_activate_file",),
}
_TOTAL = "total_"


def metrics(stats: ContainerStats, mode: CgroupMode) -> AnyMessage:
    """The Any of a Stats reply; its type URL is bare, as containerd 1.6 needs it."""
    message = _v1(stats) if mode is CgroupMode.V1 else _v2(stats)
    return AnyMessage(type_url=message.DESCRIPTOR.full_name, value=message.SerializeToString())


def _v1(stats: ContainerStats) -> v1_pb2.Metrics:
    cpu = stats.cpu
    return v1_pb2.Metrics(
        hugetlb=[
            v1_pb2.HugetlbStat(
                usage=page.usage_bytes, max=page.max_usage_bytes, failcnt=page.failures, pagesize=page.page_size
            )
            for page in stats.hugetlb
        ],
        pids=v1_pb2.PidsStat(current=stats.pids_current, limit=stats.pids_limit),
        # containerd's ctr reads cpu.usage and memory.usage without a check that they are set.
        cpu=v1_pb2.CPUStat(
            usage=v1_pb2.CPUUsage(total=cpu.total_ns, kernel=cpu.kernel_ns, user=cpu.user_ns, per_cpu=cpu.per_cpu_ns),
            throttling=v1_pb2.Throttle(
                periods=cpu.periods, throttled_periods=cpu.throttled_periods, throttled_time=cpu.throttled_ns
            ),
        ),
        memory=_v1_memory(stats.memory),
        blkio=_v1_block_io(stats.block_io),
        memory_oom_control=v1_pb2.MemoryOomControl(oom_kill=stats.oom_kills),
    )


def _v1_memory(memory: MemoryStats) -> v1_pb2.MemoryStat:
    message = v1_pb2.MemoryStat(
        usage=_v1_entry(memory.usage),
        swap=_v1_entry(memory.swap),
        kernel=_v1_entry(memory.kernel),
        # The agent's API does not have it. CRI-O panics where it is absent (internal/oci/metrics.go, KernelTCP).
        kernel_tcp=v1_pb2.MemoryEntry(),
    )
    _set_counters(message, memory.detail, _v1_lines())
    message.cache = message.cache or memory.cache_bytes
    return message


def _v1_entry(use: MemoryUse) -> v1_pb2.MemoryEntry:
    limit_bytes = use.limit_bytes if use.limit_bytes < _UNLIMITED_FROM else _V1_UNLIMITED
    return v1_pb2.MemoryEntry(limit=limit_bytes, usage=use.usage_bytes, max=use.max_usage_bytes, failcnt=use.failures)


def _v1_block_io(block_io: BlockIoStats) -> v1_pb2.BlkIOStat:
    message = v1_pb2.BlkIOStat()
    for entries, field in (
        (block_io.service_bytes, message.io_service_bytes_recursive),
        (block_io.serviced, message.io_serviced_recursive),
        (block_io.queued, message.io_queued_recursive),
        (block_io.service_time, message.io_service_time_recursive),
        (block_io.wait_time, message.io_wait_time_recursive),
        (block_io.merged, message.io_merged_recursive),
        (block_io.time, message.io_time_recursive),
        (block_io.sectors, message.sectors_recursive),
    ):
        for entry in entries:
            field.add(op=entry.op, major=entry.major, minor=entry.minor, value=entry.value)
    return message


def _v2(stats: ContainerStats) -> v2_pb2.Metrics:
    cpu = stats.cpu
    return v2_pb2.Metrics(
        pids=v2_pb2.PidsStat(current=stats.pids_current, limit=stats.pids_limit),
        cpu=v2_pb2.CPUStat(
            usage_usec=cpu.total_ns // _NS_PER_US,
            user_usec=cpu.user_ns // _NS_PER_US,
            system_usec=cpu.kernel_ns // _NS_PER_US,
            nr_periods=cpu.periods,
            nr_throttled=cpu.throttled_periods,
            throttled_usec=cpu.throttled_ns // _NS_PER_US,
        ),
        memory=_v2_memory(stats.memory),
        io=_v2_io(stats.block_io),
        # containerd 2 reads here whether a container with status 137 met an OOM kill.
        memory_events=v2_pb2.MemoryEvents(oom=stats.oom_kills, oom_kill=stats.oom_kills),
        hugetlb=[
            v2_pb2.HugeTlbStat(
                current=page.usage_bytes, max=page.max_usage_bytes, pagesize=page.page_size, failcnt=page.failures
            )
            for page in stats.hugetlb
        ],
    )


def _v2_memory(memory: MemoryStats) -> v2_pb2.MemoryStat:
    message = v2_pb2.MemoryStat()
    _set_counters(message, memory.detail, _v2_lines())
    message.file = message.file or memory.cache_bytes
    message.usage = memory.usage.usage_bytes
    message.usage_limit = memory.usage.limit_bytes
    message.max_usage = memory.usage.max_usage_bytes
    swap = _swap_alone(memory)
    message.swap_usage = swap.usage_bytes
    message.swap_limit = swap.limit_bytes
    message.swap_max_usage = memory.swap.max_usage_bytes
    return message


def _swap_alone(memory: MemoryStats) -> MemoryUse:
    """Swap without memory, as v2 counts it. The agent's API has v1's sum of both; some agents put v2's number there."""
    swap, usage = memory.swap, memory.usage
    if swap.usage_bytes < usage.usage_bytes:
        return swap
    limit_bytes = swap.limit_bytes
    if usage.limit_bytes <= limit_bytes < _UNLIMITED_FROM:
        limit_bytes -= usage.limit_bytes
    return replace(swap, usage_bytes=swap.usage_bytes - usage.usage_bytes, limit_bytes=limit_bytes)


def _v2_io(block_io: BlockIoStats) -> v2_pb2.IOStat:
    """One row per device; the operations are named `Read` and `read`, by v1 and v2 guests."""
    rows: dict[tuple[int, int], v2_pb2.IOEntry] = {}
    for entries, columns in (
        (block_io.service_bytes, {"read": "rbytes", "write": "wbytes"}),
        (block_io.serviced, {"read": "rios", "write": "wios"}),
    ):
        for entry in entries:
            column = columns.get(entry.op.lower())
            if column is not None:
                device = (entry.major, entry.minor)
                row = rows.setdefault(device, v2_pb2.IOEntry(major=entry.major, minor=entry.minor))
                setattr(row, column, entry.value)
    return v2_pb2.IOStat(usage=rows.values())


_Lines: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Counters of a message, each with the lines of memory.stat that can have its number, the best one first."""


@cache
def _v1_lines() -> _Lines:
    lines = []
    for field in _counters(v1_pb2.MemoryStat):
        plain = field.removeprefix(_TOTAL)
        names = (plain, *_V1_ALIASES.get(plain, ()))
        if field.startswith(_TOTAL):
            names = (*(_TOTAL + name for name in names), *names)
        lines.append((field, names))
    return tuple(lines)


@cache
def _v2_lines() -> _Lines:
    # A v1 guest's plain lines leave the descendants out; its total_ lines do not.
    return tuple(
        (field, (_TOTAL + field, field, *_V2_ALIASES.get(field, ()))) for field in _counters(v2_pb2.MemoryStat)
    )


def _counters(kind: type[Message]) -> list[str]:
    return [field.name for field in kind.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_UINT64]


def _set_counters(message: Message, detail: Mapping[str, int], lines: _Lines) -> None:
    for field, names in lines:
        for name in names:
            if name in detail:
                setattr(message, field, detail[name])
                break
