"""A hypervisor in memory for tests of its users: runs, dies on request, remembers what was plugged."""

import asyncio
from collections.abc import Callable, Mapping

from hypervisors.base import BlockDevice, Capabilities, Device, DiskBus, GuestLocation, VmConfig, VmExit, VmExitKind
from pyshim.model.agent_address import AgentAddress, UnixAddress
from pyshim.model.errors import DeadlineExceeded, NotFound


class FakeVm:
    """`hit` is told every step before it happens and may raise."""

    def __init__(self, hit: Callable[[str], None], *, block_hotplug: bool = True) -> None:
        self.config: VmConfig | None = None
        self.is_running = False
        self.plugged: dict[str, Device] = {}
        self.pid = 0
        self.may_stop = asyncio.Event()
        """Cleared: `stop` takes until it is set."""
        self.may_stop.set()
        self.may_unplug = asyncio.Event()
        """Cleared: the guest does not let go of devices until it is set."""
        self.may_unplug.set()
        self._hit = hit
        self._block_hotplug = block_hotplug
        self._can_grow = False
        self.vcpus = self.memory_mib = 0
        self.resizes: list[tuple[str, int]] = []
        """Every size asked for, in order."""
        self.takes_cpus_away = True
        self.guest_keeps_mib = 0
        """Memory a guest does not give back, boot memory included."""
        self.guest_takes_mib = 1 << 40
        """The most memory the guest plugs, whatever it is given."""
        self.may_answer = asyncio.Event()
        """Cleared: resizes take effect, but nothing says so until it is set."""
        self.may_answer.set()
        self._resizing = False
        self._exit: asyncio.Future[VmExit] = asyncio.get_running_loop().create_future()

    @property
    def agent_address(self) -> AgentAddress:
        return UnixAddress("/fake/agent.sock")

    def capabilities(self) -> Capabilities:
        return Capabilities(
            share_fs=True,
            block_hotplug=self._block_hotplug,
            network_hotplug=False,
            cpu_hotplug=self._can_grow,
            memory_hotplug=self._can_grow,
            pause=True,
            pci_hotplug=self.config is not None and self.config.pci.hot_plug is not None,
        )

    async def create(self, config: VmConfig) -> None:
        self._hit("create_vm")
        self.config = config
        self.vcpus, self.memory_mib = config.cpu.boot_vcpus, config.memory.boot_mib
        self._can_grow = config.memory.max_mib > config.memory.boot_mib
        self.is_running = True
        self.pid = 4711

    async def start(self) -> None:
        self._hit("start_vm")

    async def stop(self) -> None:
        await self.may_stop.wait()
        self._end(VmExitKind.REQUESTED, "stopped")

    async def wait(self) -> VmExit:
        return await asyncio.shield(self._exit)

    def die(self, reason: str) -> None:
        self._end(VmExitKind.VMM_DIED, reason)

    def _end(self, kind: VmExitKind, reason: str) -> None:
        self.is_running = False
        if not self._exit.done():
            self._exit.set_result(VmExit(kind=kind, reason=reason))

    async def pause(self) -> None:
        self._hit("pause_vm")

    async def resume(self) -> None:
        self._hit("resume_vm")

    async def plug(self, device: Device) -> GuestLocation:
        self._hit("plug")
        self.plugged[device.id] = device
        if isinstance(device, BlockDevice) and device.tuning.bus is DiskBus.VIRTIO_SCSI:
            return GuestLocation(pci_path="02/01", scsi_address=f"0:{len(self.plugged) - 1}")
        return GuestLocation(pci_path="02/01")

    async def unplug(self, device_id: str) -> None:
        await self.may_unplug.wait()
        if self.plugged.pop(device_id, None) is None:
            raise NotFound(f"unplug '{device_id}': no such device")

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        self._hit("resize_disk")
        self.resizes.append((device_id, size_bytes))

    async def resize_vcpus(self, vcpus: int) -> int:
        self._hit("resize_vcpus")
        self.resizes.append(("vcpus", vcpus))
        if vcpus > self.vcpus or self.takes_cpus_away:
            self.vcpus = vcpus
        await self._answer()
        return self.vcpus

    async def resize_memory(self, memory_mib: int) -> int:
        self._hit("resize_memory")
        self.resizes.append(("memory", memory_mib))
        assert self.config is not None
        if memory_mib > self.memory_mib:
            self.memory_mib = min(memory_mib, self.guest_takes_mib)
            if self.memory_mib < memory_mib:
                raise DeadlineExceeded(f"the guest took {self.memory_mib} MiB")
        elif self.config.memory.virtio_mem:
            self.memory_mib = max(memory_mib, min(self.memory_mib, self.guest_keeps_mib))
        await self._answer()
        return self.memory_mib

    async def _answer(self) -> None:
        """The change has happened; that it has is told later."""
        assert not self._resizing, "one change at a time"
        self._resizing = True
        await asyncio.sleep(0)
        await self.may_answer.wait()
        self._resizing = False

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        return tuple(4712 + index for index in range(self.vcpus))

    def console_tail(self) -> str:
        return "last words"

    def saved(self) -> Mapping[str, object]:
        return {"Pid": self.pid}
