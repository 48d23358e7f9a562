"""Swap space of one VM: grows with what its containers ask for, and stays until the sandbox ends."""

import asyncio
import logging
from collections.abc import Callable

from pyshim.concurrency.tasks import to_the_end
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.seams import Agent
from pyshim.resources.services import SandboxServices
from pyshim.resources.sizing.plan.swap import (
    Resources,
    swap_bytes,
    swap_directory,
    swap_disk,
    swap_file_bytes,
    swap_header,
)
from pyshim.resources.volumes.attachments import Attachments

log = logging.getLogger(__name__)


class GuestSwap:
    def __init__(self, services: SandboxServices, *, attachments: Attachments, agent: Callable[[], Agent]) -> None:
        self._services = services
        self._attachments = attachments
        self._agent = agent
        self._lock = asyncio.Lock()
        self._asked: dict[str, Resources] = {}
        self._disks = 0
        self.bytes = 0
        """The guest's swap space."""

    async def join(self, container_id: str, resources: Resources) -> None:
        """The guest has the swap space that its containers ask for, including this one.

        Without `enable_guest_swap` a request is logged and ignored. Raises what plugging the disk or the agent's call
        raises; the container is then not counted.
        """
        plan = self._services.plan
        hypervisor = plan.config.hypervisor
        if not hypervisor.enable_guest_swap:
            if swap_bytes([resources], hypervisor.default_memory_mib):
                log.warning("no swap for container: enable_guest_swap is false", extra={"container": container_id})
            return
        async with self._lock:
            wanted = swap_bytes([*self._asked.values(), resources], hypervisor.default_memory_mib)
            if wanted > self.bytes:
                await to_the_end(self._add(wanted - self.bytes))
            self._asked[container_id] = resources

    async def leave(self, container_id: str) -> None:
        """The container is not counted any more. The guest keeps the disk, which may have pages on it. Idempotent."""
        self._asked.pop(container_id, None)

    async def _add(self, wanted_bytes: int) -> None:
        plan = self._services.plan
        device = swap_disk(plan.config, plan.sandbox_id, self._disks)
        self._disks += 1
        size = swap_file_bytes(wanted_bytes)
        directory = swap_directory(plan.config, plan.sandbox_id)
        self._services.hold(LedgerEntry(kind=ResourceKind.DIRECTORY, key=directory))
        await self._services.host.make_directory(directory, 0o700)
        location = await self._attachments.attach_made_disk(device, size, swap_header(size))
        if not location.pci_path:
            raise FailedPrecondition(f"add swap '{device.path}': its disk has no PCI path in the guest")
        await self._agent().add_swap(location.pci_path)
        self.bytes += wanted_bytes
        log.info("swap added", extra={"sandbox": plan.sandbox_id, "path": device.path, "size_bytes": size})
