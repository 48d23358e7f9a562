"""containerd's Task API, generations 2 and 3: every method decodes, calls the pod, encodes."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pyshim.model.errors import Unimplemented
from pyshim.model.guest import ContainerStats
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, ProcessInfo, ProcessState
from pyshim.task import translate, translate_stats
from pyshim.task.calls import Calls, Method
from pyshim.ttrpc import Handler

SERVICES = ("containerd.task.v2.Task", "containerd.task.v3.Task")
_MAX_STATS_ANSWERS = 64
"""Containers whose last statistics are kept encoded, those that are gone among them."""


class TaskApi(Protocol):
    """The Task API in model values. `exec_id` None means the init process. Every call raises ShimError.

    Calls come in any order and at the same time. Callers that gave up repeat them. A call ends with its work done or
    undone even if its caller has ended, since ttrpc cannot cancel.
    """

    async def create(self, request: CreateTask) -> int:
        """The task's pid: stable until delete, and the same from `connect`."""

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int: ...
    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """The present state. containerd waits two seconds for it, and calls it seven times for each exec."""

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        """At least the init process: containerd takes an empty list for a leaked task."""

    async def pause(self, container_id: ContainerId) -> None: ...
    async def resume(self, container_id: ContainerId) -> None: ...
    async def kill(
        self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool
    ) -> None: ...
    async def exec(self, request: ExecTask) -> None: ...
    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None: ...
    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None: ...
    async def update(self, container_id: ContainerId, resources: Mapping[str, Any]) -> None: ...
    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        """Once it has ended; may be cancelled, and then nothing has changed."""

    async def stats(self, container_id: ContainerId) -> ContainerStats: ...
    def connect(self, container_id: ContainerId) -> int:
        """The task's pid; 0 when the container is not known."""

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]: ...
    async def shutdown(self, now: bool) -> bool:
        """True when nothing is left and this process may end; False, without effect, while there is a container."""


class _StatsAnswer(NamedTuple):
    stats: ContainerStats
    reply: bytes


class TaskService:
    """The Task API over `tasks`. `finished` is set once containerd's Shutdown found nothing left to serve."""

    def __init__(self, *, tasks: TaskApi, cgroup_mode: CgroupMode, calls: Calls) -> None:
        """`cgroup_mode` is the host's: containerd's metrics collector expects statistics in its form."""
        self.finished = asyncio.Event()
        self._tasks = tasks
        self._cgroup_mode = cgroup_mode
        self._calls = calls
        self._stats_answers: dict[ContainerId, _StatsAnswer] = {}

    def services(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers for a ttrpc server, the same under both service names."""
        return dict.fromkeys(SERVICES, self._calls.handlers(self._methods(), self._immediate_methods()))

    def _methods(self) -> dict[str, Method]:
        api = self._tasks
        return {
            "Create": Method(translate.create_request, api.create, translate.create_reply),
            "Start": Method(translate.process_ref, lambda r: api.start(*r), translate.start_reply),
            "Pause": Method(translate.task_ref, lambda r: api.pause(*r), translate.empty_reply),
            "Resume": Method(translate.task_ref, lambda r: api.resume(*r), translate.empty_reply),
            "Kill": Method(translate.kill_request, lambda r: api.kill(*r), translate.empty_reply),
            "Exec": Method(translate.exec_request, api.exec, translate.empty_reply),
            "ResizePty": Method(translate.resize_request, lambda r: api.resize_pty(*r), translate.empty_reply),
            # The flag `stdin` is ignored, as runc's shim does: clients rely on it.
            "CloseIO": Method(translate.process_ref, lambda r: api.close_io(*r), translate.empty_reply),
            "Update": Method(translate.update_request, lambda r: api.update(*r), translate.empty_reply),
            "Wait": Method(translate.process_ref, lambda r: api.wait(*r), translate.wait_reply),
            "Stats": Method(translate.task_ref, self._stats, _as_it_is),
            "Delete": Method(translate.process_ref, lambda r: api.delete(*r), translate.delete_reply),
            "Shutdown": Method(translate.shutdown_request, self._shutdown, translate.empty_reply),
            "Checkpoint": Method(translate.task_ref, _checkpoint, translate.empty_reply),
        }

    def _immediate_methods(self) -> dict[str, Method]:
        """The methods that only read memory: they are answered at once."""
        api = self._tasks
        return {
            "State": Method(translate.process_ref, lambda r: api.state(*r), translate.state_reply),
            "Pids": Method(translate.task_ref, lambda r: api.pids(*r), translate.pids_reply),
            "Connect": Method(translate.connect_request, lambda r: api.connect(*r), _connect_reply),
        }

    async def _shutdown(self, request: translate.ShutdownRequest) -> None:
        if await self._tasks.shutdown(request.now):
            self.finished.set()

    async def _stats(self, request: translate.TaskRef) -> bytes:
        """The encoded answer: the last one again while the container rests, for containerd asks every second."""
        stats = await self._tasks.stats(request.container_id)
        last = self._stats_answers.get(request.container_id)
        if last is not None and last.stats == stats:
            return last.reply
        if len(self._stats_answers) >= _MAX_STATS_ANSWERS:
            self._stats_answers.clear()
        reply = translate.stats_reply(translate_stats.metrics(stats, self._cgroup_mode))
        self._stats_answers[request.container_id] = _StatsAnswer(stats, reply)
        return reply


def _as_it_is(reply: bytes) -> bytes:
    return reply


def _connect_reply(task_pid: int) -> bytes:
    return translate.connect_reply(os.getpid(), task_pid)


async def _checkpoint(request: translate.TaskRef) -> None:
    raise Unimplemented(f"checkpoint task {request.container_id!r}: not supported for virtual machines")
