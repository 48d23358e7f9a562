"""The protocol that every hypervisor driver implements, and nothing else.

A driver object has one VM: `create` -> `start` -> (`pause`/`resume`, `plug`/`unplug`, `resize_*`) -> `stop`. A driver
enters every host resource into its `Ledger` before it makes the resource.
"""

from collections.abc import Mapping
from typing import Protocol

from pyshim.model.guest import AgentAddress
from pyshim.model.vm import Capabilities, Device, GuestLocation, VmConfig, VmExit


class Hypervisor(Protocol):
    """One VM. Errors are ShimErrors with the sandbox and the VMM's own message."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, config: VmConfig) -> None:
        """The VMM runs with the guest paused and answers its control channel. On an error nothing is left behind."""

    async def start(self) -> None:
        """The guest's CPUs run."""

    async def await_agent_device(self, timeout_s: float) -> None:
        """The agent's channel takes connections. If an early connection would break the channel, this waits until the
        guest uses it. Raises DeadlineExceeded when the guest does not.
        """

    async def stop(self) -> None:
        """The VMM has ended, by its own command or by SIGKILL. Idempotent; allowed after a failed `create`."""

    async def wait(self) -> VmExit:
        """Waits for the end of the VM and returns how it ended. Every caller gets the same answer."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def plug(self, device: Device) -> GuestLocation: ...

    async def unplug(self, device_id: str) -> None:
        """The guest has released the device and the VMM has dropped it."""

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        """The guest sees `size_bytes` on the plugged disk. The caller has resized the host's file or device before."""

    async def resize_vcpus(self, vcpus: int) -> int:
        """The number of vCPUs the VM now has: the nearest to `vcpus` that this VM can have."""

    async def resize_memory(self, memory_mib: int) -> int:
        """The MiB of RAM the VM now has, at least `memory_mib`: it grows by whole guest memory blocks.

        It shrinks with `virtio_mem` only, never below the boot size, and by no more than the guest gives back.
        """

    async def vcpu_thread_ids(self) -> tuple[int, ...]: ...

    @property
    def pid(self) -> int:
        """The VMM's pid in the host's pid namespace; 0 before `create`, and for a remote VM."""

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """The programs other than the VMM that the driver started on this host for the VM; valid after `create`."""

    @property
    def agent_address(self) -> AgentAddress:
        """The address at which the agent will answer; valid after `create`."""

    def console_tail(self) -> str:
        """The last lines of the guest console, for error texts."""

    def saved(self) -> Mapping[str, object]:
        """The driver's part of HypervisorState in Kata's persist.json."""
