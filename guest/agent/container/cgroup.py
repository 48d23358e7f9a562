"""Reads a container's cgroup v2 directory: statistics, and events of the OOM killer. A missing file counts as zero.

Sources: kernel Documentation/admin-guide/cgroup-v2.rst; each field of the API has its meaning in containerd's
cgroup v1 metrics.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Mapping
from contextlib import suppress

from protos.agent import agent_pb2 as pb

from guest.agent.children import Child
from guest.agent.errors import Unavailable
from guest.agent.files import names_in
from guest.agent.streams import EdgeEvents

_NO_LIMIT = (1 << 64) - 1
_MAX_FILE_BYTES = 1 << 16
REST_S = 10.0
"""Seconds for which the statistics of a container at rest hold."""


class CgroupStats:
    """The statistics of the cgroup at `folder`. Its files stay open: callers ask every second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fds: dict[str, int] | None = None
        """By name; None before the first reading."""
        self._signs: dict[str, bytes] = {}
        """Contents of the files that tell work, of when all files were read."""
        self._read_again_s = 0.0
        self._stats = pb.CgroupStats()

    def close(self) -> None:
        """Every file is closed and counts as zero. Idempotent."""
        for fd in (self._fds or {}).values():
            os.close(fd)
        self._fds = {}
        self.forget()

    def forget(self) -> None:
        """The next reading is of all files."""
        self._read_again_s = 0.0

    def read(self) -> pb.CgroupStats:
        """What the cgroup uses. The message stays this object's: the next call may change it.

        While the container rests only the files that would tell work are read, and the others every REST_S: without any
        work of the container the kernel moves little between their numbers.
        """
        if self._fds is None:
            self._fds = _opened(self._folder)
        signs = {name: _content(self._fds[name]) for name in _SIGNS if name in self._fds}
        now_s = time.monotonic()
        if signs != self._signs or now_s >= self._read_again_s:
            others = {name: _content(fd) for name, fd in self._fds.items() if name not in signs}
            self._stats.Clear()
            _fill(self._stats, signs | others)
            self._signs, self._read_again_s = signs, now_s + REST_S
        return self._stats


def _opened(folder: str) -> dict[str, int]:
    """The files of statistics that are there, open."""
    fds = {}
    for name in (*_FILES, *filter(_is_of_huge_pages, names_in(folder))):
        with suppress(FileNotFoundError):  # the controller is off, or the cgroup is gone
            fds[name] = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return fds


def _is_of_huge_pages(name: str) -> bool:
    words = name.split(".")
    return words[0] == "hugetlb" and words[2:] in (["current"], ["events"])


def _content(fd: int) -> bytes:
    try:
        return os.pread(fd, _MAX_FILE_BYTES, 0)
    except OSError:
        return b""  # the cgroup is gone


# -- from files to the API's numbers -----------------------------------------------------------------------------------

_SIGNS = ("cpu.stat", "io.stat", "memory.current", "pids.current")
"""Files of which one changes with all that a container does."""
_FILES = (
    *_SIGNS,
    *("memory.stat", "memory.events", "memory.peak", "memory.max", "memory.swap.current", "memory.swap.max"),
    "pids.max",
)


def _fill(stats: pb.CgroupStats, contents: Mapping[str, bytes]) -> None:
    """`stats` has the numbers of `contents`, a cgroup's files by name."""
    _fill_cpu(stats.cpu_stats, contents)
    _fill_memory(stats.memory_stats, contents)
    stats.pids_stats.current = _number(contents, "pids.current")
    stats.pids_stats.limit = _limit(_number(contents, "pids.max"))
    _fill_block_io(stats.blkio_stats, contents.get("io.stat", b"").decode())
    for name in contents:
        if name.startswith("hugetlb.") and name.endswith(".current"):
            size = name.split(".")[1]
            huge = stats.hugetlb_stats[size]
            huge.usage = _number(contents, name)
            huge.failcnt = _flat_keyed(contents, f"hugetlb.{size}.events").get("max", 0)


def _number(contents: Mapping[str, bytes], name: str) -> int:
    """The file's one number; `max` is 2^64-1."""
    text = contents.get(name, b"").strip()
    return _NO_LIMIT if text == b"max" else int(text) if text.isdigit() else 0


def _flat_keyed(contents: Mapping[str, bytes], name: str) -> dict[str, int]:
    """The file's `key value` lines."""
    words = contents.get(name, b"").decode().split()
    try:
        return dict(zip(words[::2], map(int, words[1::2]), strict=True))
    except ValueError:
        return {}


def _limit(value: int) -> int:
    return 0 if value == _NO_LIMIT else value


def _fill_cpu(stats: pb.CpuStats, contents: Mapping[str, bytes]) -> None:
    value = _flat_keyed(contents, "cpu.stat").get
    usage, throttling = stats.cpu_usage, stats.throttling_data
    usage.total_usage = value("usage_usec", 0) * 1000
    usage.usage_in_kernelmode = value("system_usec", 0) * 1000
    usage.usage_in_usermode = value("user_usec", 0) * 1000
    throttling.periods = value("nr_periods", 0)
    throttling.throttled_periods = value("nr_throttled", 0)
    throttling.throttled_time = value("throttled_usec", 0) * 1000


def _fill_memory(stats: pb.MemoryStats, contents: Mapping[str, bytes]) -> None:
    detail = _flat_keyed(contents, "memory.stat")
    usage, limit = stats.usage, _number(contents, "memory.max")
    usage.usage = _number(contents, "memory.current")
    usage.max_usage = _number(contents, "memory.peak")
    usage.failcnt = _flat_keyed(contents, "memory.events").get("max", 0)
    usage.limit = limit
    # v1 readers expect memory and swap together here.
    stats.swap_usage.usage = usage.usage + _number(contents, "memory.swap.current")
    stats.swap_usage.limit = min(limit + _number(contents, "memory.swap.max"), _NO_LIMIT)
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


def _fill_block_io(stats: pb.BlkioStats, text: str) -> None:
    for line in text.splitlines():
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
