"""The protocol that every hypervisor driver implements, and nothing else.

A driver object is one VM's whole life: `create` -> `start` -> (`pause`/`resume`, `plug`/`unplug`, `resize_*`) ->
`stop`. Every host resource a driver makes goes through the `Ledger` it was given, before it is made.
"""

from collections.abc import Mapping
from typing import Protocol

from pyshim.model.agent_address import AgentAddress
from pyshim.model.vm import Capabilities, Device, GuestLocation, VmConfig, VmExit


class Hypervisor(Protocol):
    """One VM. Errors are ShimErrors that name the sandbox and the VMM's own message."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, config: VmConfig) -> None:
        """The VMM runs with the guest paused and answers its control channel; nothing is left behind on error.

        After `stop` of a VM that was to continue from a saved machine there may be a second one.
        """

    async def start(self) -> None:
        """The guest's CPUs run."""

    async def await_agent_device(self, timeout_s: float) -> None:
        """The agent's channel takes connections. Waits only for a channel that an early connection would break, until
        the guest uses it. Raises DeadlineExceeded when the guest does not.
        """

    async def stop(self) -> None:
        """The VMM has ended: asked to first, then killed. Idempotent; also after a failed `create`."""

    async def wait(self) -> VmExit:
        """The VM has ended, in the way returned; every waiter gets the same answer."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def plug(self, device: Device) -> GuestLocation: ...

    async def unplug(self, device_id: str) -> None:
        """The guest has released the device and the VMM has dropped it."""

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        """The guest sees the plugged disk with `size_bytes`; its host file or device has grown to that before."""

    async def resize_vcpus(self, vcpus: int) -> int:
        """The number of vCPUs the VM now has: the nearest to `vcpus` that this VM can have."""

    async def resize_memory(self, memory_mib: int) -> int:
        """The MiB of RAM the VM now has, at least `memory_mib`: it grows by whole guest memory blocks.

        Shrinks with `virtio_mem` only, never below the boot size, and no further than the guest gives back.
        """

    async def vcpu_thread_ids(self) -> tuple[int, ...]: ...

    @property
    def pid(self) -> int:
        """The VMM's pid in the host's pid namespace; 0 before `create`, and for a remote VM."""

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """Programs of this host that the driver has started to serve the guest beside the VMM; valid after `create`."""

    @property
    def agent_address(self) -> AgentAddress:
        """The address at which the agent will answer; valid after `create`."""

    def console_tail(self) -> str:
        """The last lines of the guest console, for error texts."""

    def saved(self) -> Mapping[str, object]:
        """The driver's part of HypervisorState in Kata's persist.json."""
