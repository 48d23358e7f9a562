"""Reads a container's cgroup v2 directory: statistics, and events of the OOM killer. A missing file counts as zero.

Sources: kernel Documentation/admin-guide/cgroup-v2.rst; each field of the API has its meaning in containerd's
cgroup v1 metrics.
"""

from __future__ import annotations

import asyncio
import os
import select
from functools import cached_property

from protos.agent import agent_pb2 as pb

from guest.agent.children import Child
from guest.agent.errors import Unavailable
from guest.agent.files import names_in
from guest.agent.streams import EdgeEvents

_NO_LIMIT = (1 << 64) - 1
_MAX_FILE_BYTES = 1 << 16


class CgroupFiles:
    """The files of the cgroup at `folder`. Each stays open after its first use: callers ask every second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}
        """By name; -1 for a file that is not there."""
        self._is_closed = False

    def close(self) -> None:
        """Every file is closed and reads as empty. Idempotent."""
        self._is_closed = True
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
        self._fds.clear()

    def text(self, name: str) -> str:
        """The file's content."""
        try:
            fd = self._fds.get(name)
            if fd is None:
                fd = self._fds[name] = self._open(name)
            return os.pread(fd, _MAX_FILE_BYTES, 0).decode() if fd >= 0 else ""
        except OSError:
            return ""  # the cgroup is gone

    def _open(self, name: str) -> int:
        try:
            return -1 if self._is_closed else os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1

    def number(self, name: str) -> int:
        """The file's one number; `max` is 2^64-1."""
        text = self.text(name).strip()
        return _NO_LIMIT if text == "max" else int(text) if text.isdigit() else 0

    def flat_keyed(self, name: str) -> dict[str, int]:
        """The file's `key value` lines."""
        words = self.text(name).split()
        try:
            return dict(zip(words[::2], map(int, words[1::2]), strict=True))
        except ValueError:
            return {}

    @cached_property
    def page_sizes(self) -> tuple[str, ...]:
        """Of huge pages, as the names of files have them."""
        names = (name.split(".") for name in names_in(self._folder))
        return tuple(words[1] for words in names if words[0] == "hugetlb" and words[2:] == ["current"])


# -- statistics --------------------------------------------------------------------------------------------------------


def read_stats(files: CgroupFiles, stats: pb.CgroupStats) -> None:
    """`stats`, a part of the reply, has what the cgroup uses. In place: copies of messages were a fifth of the work."""
    _read_cpu(files, stats.cpu_stats)
    _read_memory(files, stats.memory_stats)
    stats.pids_stats.current = files.number("pids.current")
    stats.pids_stats.limit = _limit(files.number("pids.max"))
    _read_block_io(files, stats.blkio_stats)
    for size in files.page_sizes:
        huge = stats.hugetlb_stats[size]
        huge.usage = files.number(f"hugetlb.{size}.current")
        huge.failcnt = files.flat_keyed(f"hugetlb.{size}.events").get("max", 0)


def _limit(value: int) -> int:
    return 0 if value == _NO_LIMIT else value


def _read_cpu(files: CgroupFiles, stats: pb.CpuStats) -> None:
    value = files.flat_keyed("cpu.stat").get
    usage, throttling = stats.cpu_usage, stats.throttling_data
    usage.total_usage = value("usage_usec", 0) * 1000
    usage.usage_in_kernelmode = value("system_usec", 0) * 1000
    usage.usage_in_usermode = value("user_usec", 0) * 1000
    throttling.periods = value("nr_periods", 0)
    throttling.throttled_periods = value("nr_throttled", 0)
    throttling.throttled_time = value("throttled_usec", 0) * 1000


def _read_memory(files: CgroupFiles, stats: pb.MemoryStats) -> None:
    detail = files.flat_keyed("memory.stat")
    usage, limit = stats.usage, files.number("memory.max")
    usage.usage = files.number("memory.current")
    usage.max_usage = files.number("memory.peak")
    usage.failcnt = files.flat_keyed("memory.events").get("max", 0)
    usage.limit = limit
    # v1 readers expect memory and swap together here.
    stats.swap_usage.usage = usage.usage + files.number("memory.swap.current")
    stats.swap_usage.limit = min(limit + files.number("memory.swap.max"), _NO_LIMIT)
    stats.swap_usage.failcnt = usage.failcnt
    stats.cache = detail.get("file", 0)
    stats.use_hierarchy = True
    stats.stats.update({key: value for key, value in detail.items() if value})  # half of some 60 lines are zero


_IO_KEYS = (
    ("io_service_bytes_recursive", "rbytes", "Read"),
    ("io_service_bytes_recursive", "wbytes", "Write"),
    ("io_serviced_recursive", "rios", "Read"),
    ("io_serviced_recursive", "wios", "Write"),
)


def _read_block_io(files: CgroupFiles, stats: pb.BlkioStats) -> None:
    for line in files.text("io.stat").splitlines():
        device, _, rest = line.partition(" ")
        major, _, minor = device.partition(":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        values = dict(word.partition("=")[::2] for word in rest.split())
        for field, key, operation in _IO_KEYS:
            value = values.get(key, "")
            if value.isdigit():
                getattr(stats, field).add(major=int(major), minor=int(minor), op=operation, value=int(value))


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

    def watch(self, cid: str, cgroup: str, init: Child) -> None:
        """Until init ends, each kill of processes of the container by the OOM killer is one event.

        Source: kernel Documentation/admin-guide/cgroup-v2.rst, memory.events: a change generates a file modified event.
        """
        try:
            fd = os.open(f"{cgroup}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # the memory controller is off
        seen = _oom_kills(fd)

        def look() -> None:
            nonlocal seen
            now = _oom_kills(fd)
            if now > seen:
                self.add(cid)
            seen = now

        # Kernel files report a change as POLLPRI and POLLERR until read again.
        news = EdgeEvents(fd, select.EPOLLPRI, look)

        def end(_code: int) -> None:
            look()  # the kill that ended init may not have been noticed yet
            news.close()
            os.close(fd)

        init.when_ended(end)


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
