"""The devices of a VM elsewhere: it was chosen for having them, and each container gets its own of them by name."""

import logging
from collections.abc import Mapping
from typing import Protocol

from hypervisors.base import Hypervisor
from pyshim.model.guest import GuestContainer
from pyshim.model.ids import ContainerId
from pyshim.model.oci import OciSpec
from pyshim.plan.devices import claim_question, container_name
from pyshim.plan.kind import ContainerKind, placement
from pyshim.plan.remote_devices import own_names, remote_devices, with_names
from pyshim.plan.sandbox import SandboxPlan
from pyshim.sandbox.passed_devices import FindDevices, PassedDevices
from pyshim.sandbox.tasks import TaskOwner

log = logging.getLogger("pyshim.sandbox.devices")


class ContainerDevices(Protocol):
    async def give(self, guest: GuestContainer, spec: OciSpec) -> GuestContainer:
        """`guest` with the devices that are its own. To be undone by `take_back`, also when this raises."""

    def saved(self) -> tuple[Mapping[str, object], ...]:
        """What is passed through from this host, in the words of Kata's state."""

    async def take_back(self, container_id: str) -> None:
        """What only the container had has left the VM, or leaves it."""


def container_devices(
    *, plan: SandboxPlan, hypervisor: Hypervisor, tasks: TaskOwner, find: FindDevices
) -> ContainerDevices:
    """The devices of the VM that `plan` is of."""
    if plan.config.is_remote:
        return ClaimedDevices(plan=plan, find=find)
    return PassedDevices(plan=plan, hypervisor=hypervisor, tasks=tasks, find=find)


class ClaimedDevices:
    def __init__(self, *, plan: SandboxPlan, find: FindDevices) -> None:
        self._sandbox_id = plan.sandbox_id
        self._known = plan.devices
        self._names = remote_devices(plan.devices, plan.config.runtime.vfio_device_kinds).names
        self._find = find

    async def give(self, guest: GuestContainer, spec: OciSpec) -> GuestContainer:
        if placement(spec.annotations, ContainerId(guest.container_id)).kind is ContainerKind.POD_SANDBOX:
            return guest  # the pause container uses no device
        asked = await self._find(claim_question(spec))
        inner = own_names(self._known, self._names, container_name(spec.annotations), asked)
        if inner:
            fields = {"container": guest.container_id, "inner": ",".join(inner)}
            log.info("devices given", extra={"sandbox": self._sandbox_id, **fields})
        return with_names(guest, inner)

    def saved(self) -> tuple[Mapping[str, object], ...]:
        return ()

    async def take_back(self, container_id: str) -> None:
        """Nothing: devices stay with the VM."""
