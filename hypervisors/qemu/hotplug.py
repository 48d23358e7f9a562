"""Changes of a running VM: devices, vCPUs and memory.

Disks, NICs and shares go behind the PCI bridges of the argv (`pci.py`). The order of QMP commands is Kata's. A share
can be mounted once the guest's driver has started.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from hypervisors.qemu import devices, disks
from hypervisors.qemu.cmdline import can_hotplug
from hypervisors.qemu.disks import ANSWER_TIMEOUT_S, Disks, connect_program
from hypervisors.qemu.memory import memory_backend, resize_virtio_mem, virtio_mem_mib
from hypervisors.qemu.options import chardev_id, netdev_id, node_name, qdev_id
from hypervisors.qemu.pci import Bridges, PciDevices
from hypervisors.qemu.qmp import MemoryModule, Monitor
from pyshim.model.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ShimError,
    Unimplemented,
)
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import (
    BlockDevice,
    Capabilities,
    Device,
    EmulatedDevice,
    GuestLocation,
    LocalVm,
    MemoryBacking,
    MemoryConfig,
    NicDevice,
    ShareDevice,
    VfioDevice,
)

log = logging.getLogger(__name__)

VCPU_UNPLUG_TIMEOUT_S = 3.0
"""Seconds for the guest to release a vCPU. Most do so at once, and the next growth of the VM waits for this call."""
MEMORY_BLOCK_MIB = 128
"""Memory block of an x86-64 guest below 64 GiB and of an arm64 one with pages of 4 KiB; DIMMs come in multiples of it.
Source: the kernel's MIN_MEMORY_BLOCK_SIZE and SECTION_SIZE_BITS."""


def capabilities_of(config: LocalVm) -> Capabilities:
    hotplug = can_hotplug(config)
    behind_bridge = hotplug and config.bridges > 0
    return Capabilities(
        block_hotplug=behind_bridge,
        network_hotplug=behind_bridge,
        cpu_hotplug=config.machine.plugs_vcpus and config.cpu.max_vcpus > config.cpu.boot_vcpus,
        memory_hotplug=hotplug and _has_memory_room(config.memory),
        pause=True,
        pci_hotplug=hotplug and config.pci.hot_plug is not None,
    )


class Hotplug:
    """The devices, vCPUs and memory plugged into one running VM."""

    def __init__(self, config: LocalVm, monitor: Monitor) -> None:
        self._config = config
        self._qmp = monitor
        # Separate locks, so that a guest that is slow to release one resource does not delay the others.
        self._plug_lock, self._cpu_lock, self._memory_lock = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._device_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._bridges = Bridges(config, monitor)
        self._plugged: dict[str, Device] = {placed.device.id: placed.device for placed in config.pci.placed}
        self._disks = Disks(monitor, self._bridges)
        self._pci = PciDevices(config, monitor, self._bridges)
        self._cpu_ids: list[str] = []
        self._plugged_mib = 0

    def saved(self) -> Mapping[str, object]:
        return {
            "Bridges": self._bridges.saved(),
            "HotpluggedVCPUs": [{"ID": cpu_id} for cpu_id in self._cpu_ids],
            "HotpluggedMemory": self._plugged_mib,
            "BlockIndexMap": self._disks.saved(),
        }

    async def check_locations(self) -> None:
        await self._pci.check_locations()

    async def plug(self, device: Device) -> GuestLocation:
        is_pci = isinstance(device, VfioDevice | EmulatedDevice)
        if not is_pci and not capabilities_of(self._config).block_hotplug:  # the same bridges serve NICs
            raise self._unimplemented(f"plug {device.id!r}")
        async with self._plug_lock:
            if device.id in self._plugged:
                raise AlreadyExists(f"plug {device.id!r}: the vm has a device of this id")
            match device:
                case BlockDevice():
                    self._check_disk(device)
                    location = await self._disks.plug(device)
                case NicDevice():
                    location = await self._plug_nic(device)
                case ShareDevice():
                    location = await plug_share(self._qmp, device, self._bridges)
                case VfioDevice() | EmulatedDevice():
                    location = await self._pci.plug(device)
            self._plugged[device.id] = device
            return location

    def _check_disk(self, disk: BlockDevice) -> None:
        if disk.vhost_user is None and disks.is_scsi(disk) and self._config.scsi is None:
            raise FailedPrecondition(f"plug {disk.id!r}: the vm was made without a SCSI controller")
        if disk.vhost_user is not None and self._config.memory.backing is MemoryBacking.PRIVATE:
            raise FailedPrecondition(f"plug {disk.id!r}: a vhost-user program needs guest memory it can share")

    async def unplug(self, device_id: str) -> None:
        async with self._device_locks.setdefault(device_id, asyncio.Lock()):
            device = self._plugged.get(device_id)
            if device is None:
                raise NotFound(f"unplug {device_id!r}: the vm has no plugged device of this id")
            match device:
                case BlockDevice():
                    await self._disks.unplug(device)
                case NicDevice():
                    await self._qmp.device_remove(qdev_id(device_id))
                    await self._qmp.netdev_del(netdev_id(device_id))
                case ShareDevice():
                    raise Unimplemented(f"unplug {device_id!r}: a share stays as long as its vm")
                case VfioDevice() | EmulatedDevice():
                    await self._pci.unplug(device)
            self._bridges.free(device_id)
            del self._plugged[device_id]

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        async with self._device_locks.setdefault(device_id, asyncio.Lock()):
            device = self._plugged.get(device_id)
            if not isinstance(device, BlockDevice):
                raise NotFound(f"resize disk {device_id!r}: the vm has no plugged disk of this id")
            if device.vhost_user is not None:
                raise Unimplemented(f"resize disk {device_id!r}: the program behind '{device.path}' sets its size")
            await self._qmp.block_resize(node_name(device_id), size_bytes)

    async def plug_vsock(self) -> None:
        """The vsock device that a program serves is plugged, over the chardev of the argv."""
        driver, fields = devices.vhost_user_vsock(self._config)
        await self._bridges.add(driver, devices.VSOCK_ID, devices.VSOCK_ID, fields, ANSWER_TIMEOUT_S)

    async def _plug_nic(self, device: NicDevice) -> GuestLocation:
        """The NIC is plugged. QEMU has copies of the descriptors in `device`, which stay the caller's."""
        netdev = netdev_id(device.id)
        taps = {f"tap-{netdev}-{index}": fd for index, fd in enumerate(device.tap_fds)}
        vhosts = {f"vhost-{netdev}-{index}": fd for index, fd in enumerate(device.vhost_fds)}
        given: list[str] = []
        try:
            for name, fd in {**taps, **vhosts}.items():
                await self._qmp.getfd(name, fd)
                given.append(name)
            arguments: dict[str, object] = {"type": "tap", "id": netdev, "fds": ":".join(taps)}
            if vhosts:
                arguments |= {"vhost": True, "vhostfds": ":".join(vhosts)}
            await self._qmp.netdev_add(arguments)
        except ShimError:
            for name in given:
                with suppress(ShimError):
                    await self._qmp.closefd(name)
            raise
        try:
            fields = devices.nic_fields(device, devices.bus_of(self._config), len(taps))
            return await self._bridges.plug("virtio-net-pci", device.id, fields)
        except ShimError:
            with suppress(ShimError):
                await self._qmp.netdev_del(netdev)
            raise

    async def resize_vcpus(self, vcpus: int) -> int:
        """The VM has the number of vCPUs nearest to `vcpus`, between those it booted with and the maximum; returns it.

        Under TCG no vCPU is removed: QEMU 7.2 crashes when one is.
        """
        if vcpus < 1:
            raise InvalidArgument(f"resize vm {self._config.sandbox_id!r} to {vcpus} vCPUs: at least 1")
        async with self._cpu_lock:
            await self._drop_unplugged_cpus()
            now = self._config.cpu.boot_vcpus + len(self._cpu_ids)
            wanted = min(vcpus, max(self._config.cpu.max_vcpus, now))
            if wanted < vcpus:
                log.warning("vCPUs limited", extra={"wanted": vcpus, "limit": wanted})
            if wanted > now:
                if not capabilities_of(self._config).cpu_hotplug:
                    raise self._unimplemented(f"resize to {vcpus} vCPUs")
                await self._add_cpus(wanted - now)
            elif self._config.cpu.accelerator is not Accelerator.TCG:
                while self._cpu_ids and self._config.cpu.boot_vcpus + len(self._cpu_ids) > wanted:
                    await self._qmp.device_remove(self._cpu_ids[-1], VCPU_UNPLUG_TIMEOUT_S)
                    self._cpu_ids.pop()
            return self._config.cpu.boot_vcpus + len(self._cpu_ids)

    async def _drop_unplugged_cpus(self) -> None:
        """vCPUs that the guest has released since a timeout are no longer counted."""
        if self._cpu_ids:
            there = {slot.qom_path.rpartition("/")[2] for slot in await self._qmp.cpu_slots()}
            self._cpu_ids = [cpu_id for cpu_id in self._cpu_ids if cpu_id in there]

    async def _add_cpus(self, count: int) -> None:
        free = [slot for slot in await self._qmp.cpu_slots() if not slot.qom_path]
        if len(free) < count:
            raise ResourceExhausted(f"add {count} vCPUs to vm {self._config.sandbox_id!r}: {len(free)} places are free")
        for slot in free[:count]:
            cpu_id = f"cpu-{self._config.cpu.boot_vcpus + len(self._cpu_ids)}"
            await self._qmp.device_add(slot.type, cpu_id, slot.props)
            self._cpu_ids.append(cpu_id)

    async def resize_memory(self, memory_mib: int) -> int:
        """The VM has at least `memory_mib` of RAM; returns its MiB. It grows by one DIMM and never shrinks.

        With virtio-mem it does both, see `resize_virtio_mem`. Raises ResourceExhausted beyond the maximum or the slots.
        """
        async with self._memory_lock:
            if self._config.memory.virtio_mem:
                return await self._resize_virtio_mem(memory_mib)
            size = await self._qmp.memory_size()
            now_mib = (size.base_bytes + size.plugged_bytes) >> 20
            self._plugged_mib = size.plugged_bytes >> 20
            if memory_mib <= now_mib:
                return now_mib
            vm = f"resize vm {self._config.sandbox_id!r} to {memory_mib} MiB"
            if not capabilities_of(self._config).memory_hotplug:
                raise self._unimplemented(f"resize to {memory_mib} MiB")
            step_mib = -(-(memory_mib - now_mib) // MEMORY_BLOCK_MIB) * MEMORY_BLOCK_MIB
            if now_mib + step_mib > self._config.memory.max_mib:
                raise ResourceExhausted(f"{vm}: {now_mib + step_mib} MiB is over its {self._config.memory.max_mib} MiB")
            modules = await self._qmp.memory_modules()
            used = {module.slot for module in modules}
            # The root image as pmem has a slot of its own on top of the configured ones.
            slots = self._config.memory.slots + devices.is_image_pmem(self._config)
            slot = next((number for number in range(slots) if number not in used), None)
            if slot is None:
                raise ResourceExhausted(f"{vm}: all {self._config.memory.slots} memory slots are taken")
            await self._add_dimm(slot, step_mib, _place_behind(modules))
            self._plugged_mib += step_mib
            return now_mib + step_mib

    async def _resize_virtio_mem(self, memory_mib: int) -> int:
        memory = self._config.memory
        room_mib = virtio_mem_mib(memory) if capabilities_of(self._config).memory_hotplug else 0
        wanted_mib = -(-max(0, memory_mib - memory.boot_mib) // MEMORY_BLOCK_MIB) * MEMORY_BLOCK_MIB
        if wanted_mib and not room_mib:
            raise self._unimplemented(f"resize to {memory_mib} MiB")
        if wanted_mib > room_mib:
            raise ResourceExhausted(
                f"resize vm {self._config.sandbox_id!r} to {memory_mib} MiB: "
                f"{memory.boot_mib + wanted_mib} MiB is over its {memory.max_mib} MiB"
            )
        if room_mib:
            try:
                self._plugged_mib = await resize_virtio_mem(self._qmp, wanted_mib)
            except ShimError:
                size = await self._qmp.memory_size()
                self._plugged_mib = size.plugged_bytes >> 20
                raise
        return memory.boot_mib + self._plugged_mib

    async def _add_dimm(self, slot: int, size_mib: int, place: Mapping[str, int]) -> None:
        backend = f"mem{slot}"
        fields = memory_backend(self._config.memory, backend_id=backend, size_mib=size_mib)
        await self._qmp.object_add(fields)
        try:
            await self._qmp.device_add("pc-dimm", f"dimm{backend}", {"memdev": backend, "slot": slot, **place})
        except ShimError:
            with suppress(ShimError):
                await self._qmp.object_del(backend)
            raise

    def _unimplemented(self, doing: str) -> Unimplemented:
        machine = self._config.machine_type
        return Unimplemented(f"{doing}: vm {self._config.sandbox_id!r} ({machine}) was made without room for it")


def _place_behind(modules: Sequence[MemoryModule]) -> Mapping[str, int]:
    """Where the next DIMM goes: to a whole memory block, the only place at which the guest's kernel takes it.

    QEMU puts a DIMM right behind the root image as persistent memory, which may be of any size. Where nothing is
    plugged, the place is QEMU's: the start of its room, at a whole GiB.
    """
    end_bytes = max((module.start_bytes + module.size_bytes for module in modules), default=0)
    block_bytes = MEMORY_BLOCK_MIB << 20
    return {"addr": -(-end_bytes // block_bytes) * block_bytes} if modules else {}


def _has_memory_room(memory: MemoryConfig) -> bool:
    if memory.virtio_mem:
        return virtio_mem_mib(memory) > 0
    return memory.max_mib > memory.boot_mib and memory.slots > 0


DRIVER_TIMEOUT_S = 60.0
"""Seconds for the guest's driver to start. It took 6 s when 30 emulated VMs started on two cores, else some 10 ms."""
_PAUSE_S = 0.01


async def plug_share(monitor: Monitor, share: ShareDevice, bridges: Bridges) -> GuestLocation:
    """The guest can mount the share.

    Raises Unavailable without virtiofsd, DeadlineExceeded when the guest's driver does not start, FailedPrecondition
    when this QEMU does not say whether it has.
    """
    chardev = chardev_id(share.id)
    with connect_program(share.id, share.socket_path) as connection:
        await monitor.getfd(chardev, connection.fileno())
        await monitor.chardev_add(devices.connected_chardev(chardev, fd_name=chardev))
    try:
        fields = devices.share_fields(share, chardev)
        location = await bridges.plug("vhost-user-fs-pci", share.id, fields, ANSWER_TIMEOUT_S)
    except ShimError:
        with suppress(ShimError):
            await monitor.chardev_remove(chardev)
        raise
    await _await_driver(monitor, share)
    return location


async def _await_driver(monitor: Monitor, share: ShareDevice) -> None:
    path = f"/machine/peripheral/{qdev_id(share.id)}/virtio-backend"
    try:
        async with asyncio.timeout(DRIVER_TIMEOUT_S):
            while not (started := await monitor.is_vhost_started(path)):
                if started is None:
                    raise FailedPrecondition(f"plug {share.id!r}: this qemu does not say whether the guest uses it")
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise DeadlineExceeded(f"plug {share.id!r}: the guest does not use it after {DRIVER_TIMEOUT_S:g} s") from None
