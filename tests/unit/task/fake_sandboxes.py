"""TaskApi for tests: containers in a dictionary, every call recorded, failures on demand."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pyshim.model.errors import AlreadyExists, NotFound
from pyshim.model.guest import (
    BlockIoEntry,
    BlockIoStats,
    ContainerStats,
    CpuStats,
    HugetlbStats,
    MemoryStats,
    MemoryUse,
)
from pyshim.model.ids import ContainerId, ExecId, HostPath
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, ProcessInfo, ProcessState, Status, Stdio

PID = 4321
EXIT = ExitStatus(status=137, exited_at_ns=1_700_000_000_000_000_007)


class FakeSandboxes:
    """Every container has pid PID; `failures` maps a method name to the error it shall raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, Exception] = {}
        self.created: dict[ContainerId, CreateTask] = {}
        self.execs: dict[tuple[ContainerId, ExecId], ExecTask] = {}
        self.exited = asyncio.Event()
        self.wait_cancelled = asyncio.Event()
        self.empty = False
        self.used: dict[str, ContainerStats] = {}

    def _enter(self, method: str, container_id: ContainerId, *arguments: Any) -> None:
        self.calls.append((method, container_id, *arguments))
        if method in self.failures:
            raise self.failures[method]
        if container_id not in self.created:
            raise NotFound(f"{method} container {container_id!r}: not found")

    async def create(self, request: CreateTask) -> int:
        self.calls.append(("create", request))
        if "create" in self.failures:
            raise self.failures["create"]
        if request.container_id in self.created:
            raise AlreadyExists(f"create container {request.container_id!r}: it exists")
        self.created[request.container_id] = request
        return PID

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int:
        self._enter("start", container_id, exec_id)
        return PID

    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        self._enter("state", container_id, exec_id)
        return ProcessState(
            container_id=container_id,
            exec_id=exec_id,
            bundle=HostPath("/b"),
            pid=PID,
            status=Status.STOPPED if self.exited.is_set() else Status.RUNNING,
            stdio=Stdio(stdin="/in", stdout="/out", stderr="/err", terminal=False),
            exit=EXIT if self.exited.is_set() else None,
        )

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        self._enter("pids", container_id)
        return (ProcessInfo(pid=PID, exec_id=None), ProcessInfo(pid=PID, exec_id=ExecId("e1")))

    async def pause(self, container_id: ContainerId) -> None:
        self._enter("pause", container_id)

    async def resume(self, container_id: ContainerId) -> None:
        self._enter("resume", container_id)

    async def kill(self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool) -> None:
        self._enter("kill", container_id, exec_id, signal, all_processes)

    async def exec(self, request: ExecTask) -> None:
        self._enter("exec", request.container_id, request)

    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None:
        self._enter("resize_pty", container_id, exec_id, width, height)

    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None:
        self._enter("close_io", container_id, exec_id)

    async def update(self, container_id: ContainerId, resources: Mapping[str, Any]) -> None:
        self._enter("update", container_id, resources)

    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        self._enter("wait", container_id, exec_id)
        try:
            await self.exited.wait()
        except asyncio.CancelledError:
            self.wait_cancelled.set()
            raise
        return EXIT

    async def stats(self, container_id: ContainerId) -> ContainerStats:
        self._enter("stats", container_id)
        return self.used.get(container_id, some_stats())

    def connect(self, container_id: ContainerId) -> int:
        self.calls.append(("connect", container_id))
        return PID if container_id in self.created else 0

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]:
        self._enter("delete", container_id, exec_id)
        return PID, EXIT

    async def shutdown(self, now: bool) -> bool:
        self.calls.append(("shutdown", now))
        return self.empty


def some_stats(detail: Mapping[str, int] | None = None) -> ContainerStats:
    """Statistics in which every number is another one."""
    no_entries: tuple[BlockIoEntry, ...] = ()
    return ContainerStats(
        cpu=CpuStats(
            total_ns=9_000_000,
            user_ns=5_000_000,
            kernel_ns=4_000_000,
            per_cpu_ns=(6_000_000, 3_000_000),
            periods=11,
            throttled_periods=12,
            throttled_ns=13_000,
        ),
        memory=MemoryStats(
            cache_bytes=21,
            usage=MemoryUse(usage_bytes=22, max_usage_bytes=23, failures=24, limit_bytes=2**63),
            swap=MemoryUse(usage_bytes=26, max_usage_bytes=27, failures=28, limit_bytes=29),
            kernel=MemoryUse(usage_bytes=30, max_usage_bytes=31, failures=32, limit_bytes=33),
            detail=detail or {},
        ),
        pids_current=41,
        pids_limit=42,
        block_io=BlockIoStats(
            service_bytes=(
                BlockIoEntry(major=8, minor=0, op="Read", value=51),
                BlockIoEntry(major=8, minor=0, op="Write", value=52),
                BlockIoEntry(major=8, minor=16, op="read", value=53),
                BlockIoEntry(major=8, minor=0, op="Total", value=103),
            ),
            serviced=(BlockIoEntry(major=8, minor=16, op="Write", value=54),),
            queued=no_entries,
            service_time=no_entries,
            wait_time=no_entries,
            merged=no_entries,
            time=no_entries,
            sectors=no_entries,
        ),
        hugetlb=(HugetlbStats(page_size="2MB", usage_bytes=61, max_usage_bytes=62, failures=63),),
    )
