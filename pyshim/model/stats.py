"""A container's resource use in the guest, as the agent reports it; one form for cgroup v1 and v2."""

from collections.abc import Mapping

import msgspec


class CpuStats(msgspec.Struct, frozen=True, kw_only=True):
    total_ns: int
    user_ns: int
    kernel_ns: int
    per_cpu_ns: tuple[int, ...]
    periods: int
    throttled_periods: int
    throttled_ns: int


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    usage_bytes: int
    max_usage_bytes: int
    failures: int
    limit_bytes: int


class MemoryStats(msgspec.Struct, frozen=True, kw_only=True):
    cache_bytes: int
    usage: MemoryUse
    swap: MemoryUse
    kernel: MemoryUse
    detail: Mapping[str, int]
    """The lines of memory.stat: value by name."""


class BlockIoEntry(msgspec.Struct, frozen=True, kw_only=True):
    major: int
    minor: int
    op: str
    value: int


class BlockIoStats(msgspec.Struct, frozen=True, kw_only=True):
    """The fields have the names of the v1 blkio files. From a guest with cgroup v2 only the first two have entries."""

    service_bytes: tuple[BlockIoEntry, ...]
    serviced: tuple[BlockIoEntry, ...]
    queued: tuple[BlockIoEntry, ...]
    service_time: tuple[BlockIoEntry, ...]
    wait_time: tuple[BlockIoEntry, ...]
    merged: tuple[BlockIoEntry, ...]
    time: tuple[BlockIoEntry, ...]
    sectors: tuple[BlockIoEntry, ...]


class HugetlbStats(msgspec.Struct, frozen=True, kw_only=True):
    page_size: str
    usage_bytes: int
    max_usage_bytes: int
    failures: int


class InterfaceStats(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int


class ContainerStats(msgspec.Struct, frozen=True, kw_only=True):
    cpu: CpuStats
    memory: MemoryStats
    pids_current: int
    pids_limit: int
    """0: no limit."""
    block_io: BlockIoStats
    hugetlb: tuple[HugetlbStats, ...]
    interfaces: tuple[InterfaceStats, ...]
    oom_kills: int = 0
    """The number of OOM events that the agent has reported, which the shim counts."""


_NO_USE = MemoryUse(usage_bytes=0, max_usage_bytes=0, failures=0, limit_bytes=0)
NO_STATS = ContainerStats(
    cpu=CpuStats(total_ns=0, user_ns=0, kernel_ns=0, per_cpu_ns=(), periods=0, throttled_periods=0, throttled_ns=0),
    memory=MemoryStats(cache_bytes=0, usage=_NO_USE, swap=_NO_USE, kernel=_NO_USE, detail={}),
    pids_current=0,
    pids_limit=0,
    block_io=BlockIoStats(
        service_bytes=(), serviced=(), queued=(), service_time=(), wait_time=(), merged=(), time=(), sectors=()
    ),
    hugetlb=(),
    interfaces=(),
)
"""The statistics of a container that uses nothing."""
