"""What the task edge needs of its neighbour: the sandboxes and containers behind containerd's calls."""

from collections.abc import Mapping
from typing import Any, Protocol

from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.stats import ContainerStats
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, ProcessInfo, ProcessState


class SandboxRpc(Protocol):
    """The Task API in model values. `exec_id` None means the init process. Every call raises ShimError.

    Calls come in any order and at the same time, are repeated by callers that gave up, and end with their work done
    or undone even when nobody waits for the answer any more (ttrpc cannot cancel).
    """

    async def create(self, request: CreateTask) -> int:
        """The task's pid: stable until delete, and the same from `connect`."""

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int: ...
    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """As it is now (containerd gives it two seconds, and asks seven times for each exec)."""

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        """At least the init process, for containerd takes an empty list for a leaked task."""

    async def pause(self, container_id: ContainerId) -> None: ...
    async def resume(self, container_id: ContainerId) -> None: ...
    async def kill(
        self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool
    ) -> None: ...
    async def exec(self, request: ExecTask) -> None: ...
    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None: ...
    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None: ...
    async def update(
        self, container_id: ContainerId, resources: Mapping[str, Any], annotations: Mapping[str, str]
    ) -> None: ...
    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        """Once it has ended; may be cancelled, and then nothing has changed."""

    async def stats(self, container_id: ContainerId) -> ContainerStats: ...
    def connect(self, container_id: ContainerId) -> int:
        """The task's pid; 0 when the container is not known."""

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]: ...
    async def shutdown(self, now: bool) -> bool:
        """True when nothing is left and this process may end; False, and no effect, as long as a container lives."""
