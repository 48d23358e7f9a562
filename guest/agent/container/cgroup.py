"""Reads a container's cgroup v2 directory: statistics, and events of the OOM killer. A missing file counts as zero.

Sources: kernel Documentation/admin-guide/cgroup-v2.rst; each field of the API has its meaning in containerd's
cgroup v1 metrics.
"""

from __future__ import annotations

import asyncio
import os
import select

from protos.agent import agent_pb2 as pb

from guest.agent.container.container import Container
from guest.agent.errors import Unavailable
from guest.agent.files import names_in, read_text
from guest.agent.streams import EdgeEvents

_NO_LIMIT = (1 << 64) - 1


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def number(path: str) -> int:
    """The file's one number; `max` is 2^64-1."""
    text = _read(path).strip()
    return _NO_LIMIT if text == "max" else int(text) if text.isdigit() else 0


def flat_keyed(path: str) -> dict[str, int]:
    """The file's `key value` lines."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# -- statistics --------------------------------------------------------------------------------------------------------


def cgroup_stats(folder: str) -> pb.CgroupStats:
    """CgroupStats of the cgroup at `folder`."""
    return pb.CgroupStats(
        cpu_stats=_cpu(folder),
        memory_stats=_memory(folder),
        pids_stats=pb.PidsStats(current=number(f"{folder}/pids.current"), limit=_limit(number(f"{folder}/pids.max"))),
        blkio_stats=_block_io(folder),
        hugetlb_stats=_hugetlb(folder),
    )


def _limit(value: int) -> int:
    return 0 if value == _NO_LIMIT else value


def _cpu(folder: str) -> pb.CpuStats:
    stat = flat_keyed(f"{folder}/cpu.stat")
    return pb.CpuStats(
        cpu_usage=pb.CpuUsage(
            total_usage=stat.get("usage_usec", 0) * 1000,
            usage_in_kernelmode=stat.get("system_usec", 0) * 1000,
            usage_in_usermode=stat.get("user_usec", 0) * 1000,
        ),
        throttling_data=pb.ThrottlingData(
            periods=stat.get("nr_periods", 0),
            throttled_periods=stat.get("nr_throttled", 0),
            throttled_time=stat.get("throttled_usec", 0) * 1000,
        ),
    )


def _memory(folder: str) -> pb.MemoryStats:
    stat = flat_keyed(f"{folder}/memory.stat")
    events = flat_keyed(f"{folder}/memory.events")
    usage = number(f"{folder}/memory.current")
    limit = number(f"{folder}/memory.max")
    swap = number(f"{folder}/memory.swap.current")
    swap_limit = number(f"{folder}/memory.swap.max")
    return pb.MemoryStats(
        cache=stat.get("file", 0),
        usage=pb.MemoryData(
            usage=usage,
            max_usage=number(f"{folder}/memory.peak"),
            failcnt=events.get("max", 0),
            limit=limit,
        ),
        # v1 readers expect memory and swap together here.
        swap_usage=pb.MemoryData(
            usage=usage + swap, limit=min(limit + swap_limit, _NO_LIMIT), failcnt=events.get("max", 0)
        ),
        use_hierarchy=True,
        stats=stat,
    )


_IO_KEYS = (
    ("io_service_bytes_recursive", "rbytes", "Read"),
    ("io_service_bytes_recursive", "wbytes", "Write"),
    ("io_serviced_recursive", "rios", "Read"),
    ("io_serviced_recursive", "wios", "Write"),
)


def _block_io(folder: str) -> pb.BlkioStats:
    stats = pb.BlkioStats()
    for line in _read(f"{folder}/io.stat").splitlines():
        device, _, rest = line.partition(" ")
        major, _, minor = device.partition(":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        values = dict(word.partition("=")[::2] for word in rest.split())
        for field, key, operation in _IO_KEYS:
            value = values.get(key, "")
            if value.isdigit():
                entry = pb.BlkioStatsEntry(major=int(major), minor=int(minor), op=operation, value=int(value))
                getattr(stats, field).append(entry)
    return stats


def _hugetlb(folder: str) -> dict[str, pb.HugetlbStats]:
    stats = {}
    for name in names_in(folder):
        if name.startswith("hugetlb.") and name.endswith(".current") and ".rsvd." not in name:
            size = name[len("hugetlb.") : -len(".current")]
            events = flat_keyed(f"{folder}/hugetlb.{size}.events")
            stats[size] = pb.HugetlbStats(usage=number(f"{folder}/{name}"), failcnt=events.get("max", 0))
    return stats


# -- events of the OOM killer ------------------------------------------------------------------------------------------

# If no shim asks, the oldest events are dropped.
_MAX_EVENTS = 100


class OomEvents:
    """Ids of containers that lost a process to the OOM killer."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._news = asyncio.Event()
        self._is_over = False

    async def next(self) -> str:
        """The oldest event that no earlier call returned, once there is one. Unavailable if the sandbox ends."""
        while not self._events:
            if self._is_over:
                raise Unavailable("get OOM event: the sandbox is destroyed")
            self._news.clear()
            await self._news.wait()
        return self._events.pop(0)

    def add(self, container_id: str) -> None:
        self._events.append(container_id)
        del self._events[:-_MAX_EVENTS]
        self._news.set()

    def end(self) -> None:
        """Calls that wait for an event end."""
        self._is_over = True
        self._news.set()

    def watch(self, container: Container) -> None:
        """Until init ends, each kill of processes of the container by the OOM killer is one event.

        Source: kernel Documentation/admin-guide/cgroup-v2.rst, memory.events: a change generates a file modified event.
        """
        try:
            fd = os.open(f"{container.cgroup}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # the memory controller is off
        seen = _oom_kills(fd)

        def look() -> None:
            nonlocal seen
            now = _oom_kills(fd)
            if now > seen:
                self.add(container.cid)
            seen = now

        # Kernel files report a change as POLLPRI and POLLERR until read again.
        news = EdgeEvents(fd, select.EPOLLPRI, look)

        def end(_code: int) -> None:
            look()  # the kill that ended init may not have been noticed yet
            news.close()
            os.close(fd)

        container.init.child.when_ended(end)


def _oom_kills(fd: int) -> int:
    try:
        text = os.pread(fd, 4096, 0).decode("ascii", "replace")
    except OSError:
        return 0  # the cgroup is being removed
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return 0
