"""The fake hypervisor with a guest whose moods a test sets: slow to answer, unwilling to give back what it has."""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from pyshim.model.errors import DeadlineExceeded
from pyshim.model.ledger import Ledger
from pyshim.model.vm import Capabilities, LocalVm, VmExitKind
from tests.fakes.hypervisor import FakeHypervisor

_STEPS = {"create": "create_vm", "start": "start_vm", "pause": "pause_vm", "resume": "resume_vm", "stop": "stop_vm"}


class FakeVm(FakeHypervisor):
    """`hit` is called before every step and may raise."""

    def __init__(self, hit: Callable[[str], None], ledger: Ledger, *, block_hotplug: bool = True) -> None:
        super().__init__(ledger, failpoint=lambda call: hit(_STEPS.get(call, call)), files_exist=True)
        self.may_stop = asyncio.Event()
        """Cleared: `stop` takes until it is set."""
        self.may_stop.set()
        self.may_unplug = asyncio.Event()
        """Cleared: the guest does not let go of devices until it is set."""
        self.may_unplug.set()
        self.keeps_devices = False
        """The guest lets go of nothing within the deadline."""
        self._block_hotplug = block_hotplug
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
        self.print("last words")

    @property
    def is_running(self) -> bool:
        return self.phase not in ("new", "ended")

    @property
    def vcpus(self) -> int:
        return self._vcpus

    @property
    def memory_mib(self) -> int:
        return self._memory_mib

    def capabilities(self) -> Capabilities:
        found = super().capabilities()
        pci_hotplug = isinstance(self.config, LocalVm) and self.config.pci.hot_plug is not None
        return replace(found, block_hotplug=found.block_hotplug and self._block_hotplug, pci_hotplug=pci_hotplug)

    def die(self, reason: str) -> None:  # type: ignore[override]
        """The VM ends by itself, and `reason` is all that is said of it."""
        if self.is_running:
            self._end(VmExitKind.VMM_DIED, reason)

    async def stop(self) -> None:
        await self.may_stop.wait()
        await super().stop()

    async def unplug(self, device_id: str) -> None:
        await self.may_unplug.wait()
        if self.keeps_devices:
            raise DeadlineExceeded(f"unplug '{device_id}': the guest did not let go")
        await super().unplug(device_id)

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        await super().resize_disk(device_id, size_bytes)
        self.resizes.append((device_id, size_bytes))

    async def resize_vcpus(self, vcpus: int) -> int:
        self._failpoint("resize_vcpus")
        self.resizes.append(("vcpus", vcpus))
        if vcpus > self._vcpus or self.takes_cpus_away:
            self._vcpus = vcpus
        await self._answer()
        return self._vcpus

    async def resize_memory(self, memory_mib: int) -> int:
        self._failpoint("resize_memory")
        self.resizes.append(("memory", memory_mib))
        assert self.config is not None
        if memory_mib > self._memory_mib:
            self._memory_mib = min(memory_mib, self.guest_takes_mib)
            if self._memory_mib < memory_mib:
                raise DeadlineExceeded(f"the guest took {self._memory_mib} MiB")
        elif self.config.memory.virtio_mem:
            self._memory_mib = max(memory_mib, min(self._memory_mib, self.guest_keeps_mib))
        await self._answer()
        return self._memory_mib

    async def _answer(self) -> None:
        """The change has happened; the answer comes later."""
        assert not self._resizing, "one change at a time"
        self._resizing = True
        await asyncio.sleep(0)
        await self.may_answer.wait()
        self._resizing = False
