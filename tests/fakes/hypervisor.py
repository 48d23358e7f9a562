"""A hypervisor in memory that keeps the promises of the seam: the contract suite runs on it and on the real one."""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from hypervisors.qemu.vm import QemuVm
from pyshim.concurrency.deadlines import given_s, within_s
from pyshim.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from pyshim.model.guest import AgentAddress, SerialAddress, UnixAddress, VsockAddress
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.vm import (
    BlockDevice,
    Capabilities,
    Device,
    DiskBus,
    GuestLocation,
    LocalVm,
    RemoteVm,
    SerialChannel,
    VmConfig,
    VmExit,
    VmExitKind,
)
from tests.fakes.deadlines import deadlines_of

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "new": frozenset({"created", "ended"}),
    "created": frozenset({"running", "ended"}),
    "running": frozenset({"paused", "ended"}),
    "paused": frozenset({"running", "ended"}),
    "ended": frozenset(),
}
_MEMORY_BLOCK_MIB = 128
_FIRST_PID, _FIRST_THREAD = 4_200_000, 4_200_100  # above any pid_max


def _start_s(vm: "FakeHypervisor") -> float:
    return given_s(vm.config.start_timeout_s if vm.config is not None else None)


def _stop_s(vm: "FakeHypervisor") -> float:
    return given_s(vm.config.stop_timeout_s if vm.config is not None else None)


def _files(config: VmConfig) -> tuple[str | None, ...]:
    if isinstance(config, RemoteVm):
        return ()
    return (config.hypervisor_path, config.boot.kernel, config.boot.initrd, config.boot.image)


@deadlines_of(QemuVm)
class FakeHypervisor:
    """`failpoint` gets the name of every call before it has an effect, and may raise or wait.

    Tests read `phase`, `config` and `plugged`, and end the VM by `die`.
    """

    def __init__(
        self, ledger: Ledger, *, failpoint: Callable[[str], None] = lambda _call: None, files_exist: bool = False
    ) -> None:
        """With `files_exist` the paths of a config need not be real."""
        self.phase = "new"
        self.config: Any = None
        """The `VmConfig` that it was created with."""
        self.plugged: dict[str, Device] = {}
        self._ledger = ledger
        self._failpoint = failpoint
        self._files_exist = files_exist
        self._entries: list[LedgerEntry] = []
        self._exit: asyncio.Future[VmExit] | None = None
        self._slots: dict[int, str] = {}
        self._luns: dict[int, str] = {}
        self._vcpus = 0
        self._memory_mib = 0
        self._console: list[str] = []

    # For tests

    def die(self, kind: VmExitKind = VmExitKind.VMM_DIED, reason: str = "was killed by SIGKILL") -> None:
        """The VM ends by itself."""
        assert self.config is not None
        self._end(kind, f"vm {self.config.sandbox_id!r}: {reason}")

    def _end(self, kind: VmExitKind, reason: str) -> None:
        assert self._exit is not None
        self._become("ended")
        if not self._exit.done():
            self._exit.set_result(VmExit(kind=kind, reason=reason))

    def print(self, line: str) -> None:
        """The guest prints on its console."""
        self._console.append(line)

    def _become(self, phase: str) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    # The seam

    def capabilities(self) -> Capabilities:
        config = self._created("ask capabilities")
        hotplug = isinstance(config, LocalVm) and config.machine_type == "q35"
        return Capabilities(
            block_hotplug=hotplug and config.bridges > 0,
            network_hotplug=hotplug and config.bridges > 0,
            cpu_hotplug=hotplug and config.cpu.max_vcpus > config.cpu.boot_vcpus,
            memory_hotplug=hotplug and config.memory.max_mib > config.memory.boot_mib and config.memory.slots > 0,
            pause=True,
        )

    async def create(self, config: VmConfig) -> None:
        self._failpoint("create")
        if self.config is not None or self.phase != "new":
            raise FailedPrecondition(f"create vm {config.sandbox_id!r}: this driver object has made its vm already")
        for path in _files(config):
            if path is not None and not self._exists(path):
                raise FailedPrecondition(f"start vm {config.sandbox_id!r}: open {path!r}: ENOENT")
        self.config = config
        entry = LedgerEntry(kind=ResourceKind.PROCESS, key=config.uuid)
        try:
            self._acquire(entry)
            self._failpoint("spawn")
            self._acquire(LedgerEntry(kind=entry.kind, key=entry.key, detail={"pid": self.pid, "start_ticks": 1}))
        except BaseException:
            await self.stop()
            raise
        self._exit = asyncio.get_running_loop().create_future()
        self._vcpus = config.cpu.boot_vcpus
        self._memory_mib = config.memory.boot_mib
        self._become("created")

    def _acquire(self, entry: LedgerEntry) -> None:
        self._ledger.acquire(entry)
        self._entries.append(entry)

    @within_s(_start_s, "start vm")
    async def start(self) -> None:
        self._failpoint("start")
        self._in_phase("start", "created")
        self._become("running")

    async def pause(self) -> None:
        self._failpoint("pause")
        self._in_phase("pause", "running")
        self._become("paused")

    async def resume(self) -> None:
        self._failpoint("resume")
        self._in_phase("resume", "paused")
        self._become("running")

    @within_s(_stop_s, "stop vm")
    async def stop(self) -> None:
        self._failpoint("stop")
        if self.phase != "ended":
            if self._exit is not None:
                assert self.config is not None
                self._end(VmExitKind.REQUESTED, f"vm {self.config.sandbox_id!r}: was stopped")
            self.phase = "ended"
        while self._entries:
            await self._ledger.release(self._entries.pop())

    async def wait(self) -> VmExit:
        if self._exit is None:
            raise FailedPrecondition("wait for vm: it was not created")
        return await asyncio.shield(self._exit)

    async def plug(self, device: Device) -> GuestLocation:
        self._failpoint("plug")
        config = self._in_phase(f"plug {device.id!r}", "created", "running", "paused")
        if not self.capabilities().block_hotplug:
            raise Unimplemented(f"plug {device.id!r}: vm {config.sandbox_id!r} was made without room for it")
        if device.id in self.plugged:
            raise AlreadyExists(f"plug {device.id!r}: the vm has a device of this id")
        if isinstance(device, BlockDevice) and not self._exists(device.path):
            raise FailedPrecondition(f"plug {device.id!r}: {device.path!r}: ENOENT")
        if isinstance(device, BlockDevice) and device.tuning.bus is DiskBus.VIRTIO_SCSI and not device.vhost_user:
            if config.scsi is None:
                raise FailedPrecondition(f"plug {device.id!r}: the vm was made without a SCSI controller")
            lun = next(number for number in range(256) if number not in self._luns)
            self._luns[lun] = device.id
            self.plugged[device.id] = device
            return GuestLocation(pci_path="08", scsi_address=f"0:{lun}")
        slot = next(number for number in range(1, 31) if number not in self._slots)
        self._slots[slot] = device.id
        self.plugged[device.id] = device
        return GuestLocation(pci_path=f"02/{slot:02x}")

    async def unplug(self, device_id: str) -> None:
        self._failpoint("unplug")
        self._in_phase(f"unplug {device_id!r}", "created", "running", "paused")
        if device_id not in self.plugged:
            raise NotFound(f"unplug {device_id!r}: the vm has no plugged device of this id")
        del self.plugged[device_id]
        self._slots = {slot: holder for slot, holder in self._slots.items() if holder != device_id}
        self._luns = {lun: holder for lun, holder in self._luns.items() if holder != device_id}

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        self._failpoint("resize_disk")
        self._in_phase(f"resize disk {device_id!r}", "created", "running", "paused")
        if not isinstance(self.plugged.get(device_id), BlockDevice):
            raise NotFound(f"resize disk {device_id!r}: the vm has no plugged disk of this id")

    async def resize_vcpus(self, vcpus: int) -> int:
        self._failpoint("resize_vcpus")
        config = self._in_phase("resize vCPUs", "created", "running", "paused")
        if vcpus < 1:
            raise InvalidArgument(f"resize to {vcpus} vCPUs: at least 1")
        if vcpus > self._vcpus:
            self._vcpus = min(vcpus, max(config.cpu.max_vcpus, self._vcpus))
        return self._vcpus

    async def resize_memory(self, memory_mib: int) -> int:
        self._failpoint("resize_memory")
        config = self._in_phase("resize memory", "created", "running", "paused")
        if memory_mib <= self._memory_mib:
            return self._memory_mib
        if not self.capabilities().memory_hotplug:
            raise Unimplemented(f"resize to {memory_mib} MiB: vm {config.sandbox_id!r} was made without room for it")
        step_mib = -(-(memory_mib - self._memory_mib) // _MEMORY_BLOCK_MIB) * _MEMORY_BLOCK_MIB
        if self._memory_mib + step_mib > config.memory.max_mib:
            raise ResourceExhausted(f"resize to {memory_mib} MiB: over {config.memory.max_mib} MiB")
        self._memory_mib += step_mib
        return self._memory_mib

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        self._in_phase("list vCPU threads", "created", "running", "paused")
        return tuple(_FIRST_THREAD + index for index in range(self._vcpus))

    async def await_agent_device(self, timeout_s: float) -> None:
        self._in_phase("await agent device", "running", "paused")

    @property
    def pid(self) -> int:
        return _FIRST_PID if isinstance(self.config, LocalVm) else 0

    @property
    def helper_pids(self) -> tuple[int, ...]:
        return ()

    @property
    def agent_address(self) -> AgentAddress:
        config = self._created("ask agent address")
        if isinstance(config, RemoteVm):
            return UnixAddress("/run/peerpod/pods/agent.ttrpc")
        channel = config.agent_channel
        if isinstance(channel, SerialChannel):
            return SerialAddress(channel.socket_path)
        return VsockAddress(4242, channel.port)

    def console_tail(self) -> str:
        return "\n".join(self._console[-50:])

    def saved(self) -> Mapping[str, object]:
        config = self._created("save the vm")
        return {"Type": "fake", "UUID": config.uuid, "APISocket": "", "Pid": self.pid}

    def _exists(self, path: str) -> bool:
        return self._files_exist or os.path.exists(path)

    def _created(self, doing: str) -> Any:
        if self.config is None:
            raise FailedPrecondition(f"{doing}: the vm was not created")
        return self.config

    def _in_phase(self, doing: str, *phases: str) -> Any:
        if self.phase == "ended":
            raise Unavailable(f"{doing}: the vm has ended")
        if self.phase not in phases:
            raise FailedPrecondition(f"{doing}: the vm is {self.phase}")
        return self._created(doing)
