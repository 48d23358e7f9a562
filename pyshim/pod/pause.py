"""A pod's sandbox container, which the shim answers for: the guest has neither its image nor a process of it.

With runc, the pause container holds the pod's namespaces and is killed when the pod ends. Here the VM does both, with
one exception: a pid namespace that the pod's containers share needs a first process. When a container asks for such a
namespace, the sandbox container is made in the guest before it, because kata-agent shares the pid namespace of the
first container.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.guest import NO_STATS, ContainerStats, GuestContainer, Storage
from pyshim.model.plans import ContainerPlan
from pyshim.model.task import EXIT_KILLED, EXIT_SANDBOX_LOST
from pyshim.model.volumes import CopiedPiece
from pyshim.pod.container import remove_from_guest
from pyshim.pod.sandbox import Sandbox
from pyshim.resources.volumes.live import make_mounts

log = logging.getLogger(__name__)

_EXIT_STATUSES = {2: 0, 9: EXIT_KILLED, 15: 0}
"""The exit status of Kubernetes' pause program by signal: SIGINT and SIGTERM give 0. It ignores all others."""


class PauseAgent:
    """Answers the agent's calls for the sandbox container; `plan` includes its image, for `enter_guest`."""

    def __init__(self, plan: ContainerPlan, sandbox: Sandbox) -> None:
        self._plan = plan
        self.container_id = plan.container_id
        self._agent = sandbox.agent
        self._attachments = sandbox.vm.attachments
        self._services = sandbox.services
        self._entering = asyncio.Lock()
        self._in_guest = False
        self._undo = Undo(f"sandbox container '{self.container_id}'")
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def enter_guest(self, timeout_s: float) -> None:
        """The container runs in the guest, its image shared. Idempotent; nothing of it is left when this raises."""
        async with self._entering:
            if self._in_guest:
                return
            try:
                await self._make(timeout_s)
            except BaseException:
                await self._undo.run()
                raise
            self._in_guest = True
        log.info("sandbox container made for a shared pid namespace", extra={"container": self.container_id})
        self._services.tasks.supervise(f"wait/pause/{self.container_id}", self._watch())

    async def _make(self, timeout_s: float) -> None:
        await make_mounts(self._plan, host=self._services.host, ledger=self._services.ledger, undo=self._undo)
        guest = await self._attachments.attach(self._plan, self._undo)
        await self._attachments.copies.attach(self._plan, self._agent, self._undo)
        self._undo.push(remove_from_guest, self._agent, self.container_id)
        await self._agent.create_container(guest, timeout_s)
        await self._agent.start_container(self.container_id)

    async def _watch(self) -> None:
        try:
            self._end(await self._agent.wait_process(self.container_id, self.container_id))
        except ShimError as exc:
            log.debug("wait for sandbox container", extra={"container": self.container_id, "error": str(exc)})
            self._end(EXIT_SANDBOX_LOST)

    def _end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    # ---- the agent's calls

    async def create_container(self, container: GuestContainer, timeout_s: float) -> None:
        """Nothing to make yet."""

    async def start_container(self, container_id: str) -> None:
        """Nothing to start yet."""

    async def remove_container(self, container_id: str, timeout_s: int) -> None:
        self._end(EXIT_KILLED)
        if error := await self._undo.run():
            raise error

    async def signal_process(self, container_id: str, exec_id: str, signal: int) -> None:
        if self._in_guest:
            await self._agent.signal_process(container_id, exec_id, signal)
        elif signal in _EXIT_STATUSES:
            self._end(_EXIT_STATUSES[signal])

    async def wait_process(self, container_id: str, exec_id: str, within_s: float | None = None) -> int:
        return await asyncio.shield(self._exit)

    async def exec_process(self, container_id: str, exec_id: str, process: Mapping[str, Any]) -> None:
        raise FailedPrecondition(f"exec '{exec_id}' in '{container_id}': a pod's sandbox container runs no programs")

    async def update_container(self, container_id: str, resources: Mapping[str, Any]) -> None:
        """Nothing runs that could be limited."""

    async def update_ephemeral_mounts(self, storages: tuple[Storage, ...]) -> None:
        """It has no mounts."""

    async def stats_container(self, container_id: str) -> ContainerStats:
        return NO_STATS

    async def pause_container(self, container_id: str) -> None:
        """Nothing runs that could be frozen."""

    async def resume_container(self, container_id: str) -> None:
        """Nothing was frozen."""

    async def write_stdin(self, container_id: str, exec_id: str, data: bytes | memoryview) -> int:
        return len(data)

    async def read_stdout(self, container_id: str, exec_id: str, max_bytes: int) -> bytes:
        return b""

    async def read_stderr(self, container_id: str, exec_id: str, max_bytes: int) -> bytes:
        return b""

    async def keeps_output(self) -> bool:
        return False

    async def end_output(self, container_id: str, exec_id: str) -> None:
        """It has none."""

    async def close_stdin(self, container_id: str, exec_id: str) -> None:
        """No process reads it."""

    async def copy_file(self, piece: CopiedPiece) -> None:
        """It has no volumes."""

    async def resize_terminal(self, container_id: str, exec_id: str, rows: int, columns: int) -> None:
        """It has none."""
