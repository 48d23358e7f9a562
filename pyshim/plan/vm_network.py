"""The VM of a sandbox whose network is connected: what only then is known of its devices. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from hypervisors.base import MemoryBacking, NicDevice, VfioDevice, VhostUserNic, VmConfig
from pyshim.model.errors import FailedPrecondition
from pyshim.plan.devices import device_layout
from pyshim.plan.sandbox import PASSING_TIMEOUT_S, SandboxPlan


def vm_with_network(
    plan: SandboxPlan,
    *,
    nics: tuple[NicDevice, ...],
    vhost_user_nics: tuple[VhostUserNic, ...],
    functions: Mapping[str, VfioDevice],
) -> VmConfig:
    """The planned VM with its network devices; functions that are to be hot plugged have a port waiting for them.

    Raises FailedPrecondition for a confidential guest that would have to share its memory, and what `pci_layout` does.
    """
    vm = replace(plan.vm, nics=nics, vhost_user_nics=vhost_user_nics)
    if vhost_user_nics and vm.guard is not None:
        raise FailedPrecondition(
            f"connect '{vhost_user_nics[0].socket_path}': a confidential guest shares no memory with the host"
        )
    if vhost_user_nics and vm.memory.backing is MemoryBacking.PRIVATE:
        vm = replace(vm, memory=replace(vm.memory, backing=MemoryBacking.SHARED_MEMFD))
    if functions:
        pci = device_layout(plan.config, plan.devices, tuple(functions.values()))
        vm = replace(vm, pci=pci, start_timeout_s=PASSING_TIMEOUT_S)
    return vm
