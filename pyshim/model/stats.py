"""A container's resource use as the agent reports it (guest cgroup), neutral between cgroup v1 and v2 messages."""

from collections.abc import Mapping

from pyshim.model.dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStats:
    total_ns: int
    user_ns: int
    kernel_ns: int
    per_cpu_ns: tuple[int, ...]
    periods: int
    throttled_periods: int
    throttled_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    usage_bytes: int
    max_usage_bytes: int
    failures: int
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    cache_bytes: int
    usage: MemoryUse
    swap: MemoryUse
    kernel: MemoryUse
    detail: Mapping[str, int]
    """The lines of memory.stat, by their own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIoEntry:
    major: int
    minor: int
    op: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIoStats:
    """By the names of the v1 blkio files; from a cgroup v2 guest only the first two are filled."""

    service_bytes: tuple[BlockIoEntry, ...]
    serviced: tuple[BlockIoEntry, ...]
    queued: tuple[BlockIoEntry, ...]
    service_time: tuple[BlockIoEntry, ...]
    wait_time: tuple[BlockIoEntry, ...]
    merged: tuple[BlockIoEntry, ...]
    time: tuple[BlockIoEntry, ...]
    sectors: tuple[BlockIoEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HugetlbStats:
    page_size: str
    usage_bytes: int
    max_usage_bytes: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceStats:
    name: str
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStats:
    cpu: CpuStats
    memory: MemoryStats
    pids_current: int
    pids_limit: int
    """0: no limit."""
    block_io: BlockIoStats
    hugetlb: tuple[HugetlbStats, ...]
    interfaces: tuple[InterfaceStats, ...]
    oom_kills: int = 0
    """Times the guest's agent told of an OOM kill in the container; counted by the shim."""
