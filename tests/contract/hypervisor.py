"""The promises of every hypervisor driver (hypervisors/base.py), as tests: run on the fake and on QEMU."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.base import Hypervisor
from pyshim.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from pyshim.model.ledger import Ledger, ResourceKind
from pyshim.model.vm import BlockDevice, DiskBus, LocalVm, ScsiController, VmExitKind
from tests.fakes.disks import disk as plain_disk
from tests.fakes.ledger import FakeLedger


class Rig(ABC):
    """One driver under test."""

    ledger: FakeLedger

    @abstractmethod
    def hypervisor(self, ledger: Ledger | None = None) -> Hypervisor:
        """A fresh driver object, on `ledger` where given."""

    @abstractmethod
    def config(self) -> LocalVm:
        """A VM that stays idle: 1 vCPU of at most 2, 256 MiB of at most 1024 in 4 slots, one bridge."""

    @abstractmethod
    def kill_vmm(self, vm: Hypervisor) -> None:
        """The VMM dies as by kill -9."""

    @abstractmethod
    def left_behind(self) -> list[str]:
        """Processes and files that should be gone."""


async def running(rig: Rig, config: LocalVm | None = None) -> Hypervisor:
    vm = rig.hypervisor()
    await vm.create(config or rig.config())
    await vm.start()
    return vm


def disk(tmp_path: Path, name: str, **changes: Any) -> BlockDevice:
    path = tmp_path / f"{name}.img"
    path.write_bytes(bytes(1 << 20))
    return plain_disk(name, path, **changes)


class HypervisorContract:
    """Mix in, and give a fixture `rig`."""

    @pytest.fixture(autouse=True)
    def clean_host(self, rig: Rig, no_task_left: None) -> Iterator[None]:
        yield
        assert rig.ledger.held == {}
        assert rig.left_behind() == []

    async def test_a_vm_lives_from_create_to_stop_and_is_in_the_ledger_meanwhile(self, rig: Rig) -> None:
        vm = rig.hypervisor()
        assert vm.pid == 0

        await vm.create(rig.config())
        held = rig.ledger.held[ResourceKind.PROCESS, rig.config().uuid]
        assert held.detail["pid"] == vm.pid > 0
        assert str(vm.agent_address).startswith("serial://")

        await vm.start()
        waiting = asyncio.create_task(vm.wait())
        assert len(await vm.vcpu_thread_ids()) == 1
        assert not waiting.done()

        await vm.stop()
        assert (await waiting).kind is VmExitKind.REQUESTED

    async def test_calls_before_create_are_refused(self, rig: Rig) -> None:
        vm = rig.hypervisor()

        for call in (vm.start, vm.pause, vm.resume, vm.wait, vm.vcpu_thread_ids):
            with pytest.raises(FailedPrecondition):
                await call()
        for ask in (vm.saved, vm.capabilities, lambda: vm.agent_address):
            with pytest.raises(FailedPrecondition):
                ask()
        assert vm.console_tail() == ""

    async def test_stop_is_fine_before_create_and_forbids_it_after(self, rig: Rig) -> None:
        vm = rig.hypervisor()

        await vm.stop()
        await vm.stop()

        with pytest.raises(FailedPrecondition):
            await vm.create(rig.config())

    async def test_one_object_has_one_vm(self, rig: Rig) -> None:
        vm = await running(rig)
        pid = vm.pid

        with pytest.raises(FailedPrecondition):
            await vm.create(rig.config())
        with pytest.raises(FailedPrecondition):
            await vm.start()

        assert vm.pid == pid
        assert await vm.vcpu_thread_ids()
        await vm.stop()

    async def test_a_vm_can_be_stopped_before_it_was_started(self, rig: Rig) -> None:
        vm = rig.hypervisor()
        await vm.create(rig.config())

        with pytest.raises(FailedPrecondition):
            await vm.pause()
        await vm.stop()

        assert (await vm.wait()).kind is VmExitKind.REQUESTED

    async def test_pause_and_resume_take_turns(self, rig: Rig) -> None:
        vm = await running(rig)

        with pytest.raises(FailedPrecondition):
            await vm.resume()
        await vm.pause()
        with pytest.raises(FailedPrecondition):
            await vm.pause()
        await vm.resume()
        await vm.pause()

        await vm.stop()
        assert (await vm.wait()).kind is VmExitKind.REQUESTED

    async def test_death_of_the_vmm_reaches_every_waiter_with_the_same_words(self, rig: Rig) -> None:
        vm = await running(rig)
        waiters = [asyncio.create_task(vm.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()

        rig.kill_vmm(vm)

        first, second = await asyncio.gather(*waiters[1:])
        assert first == second == await vm.wait()
        assert first.kind is VmExitKind.VMM_DIED
        assert "SIGKILL" in first.reason
        assert rig.config().sandbox_id in first.reason
        for call in (vm.start, vm.pause, vm.resume, vm.vcpu_thread_ids):
            with pytest.raises(Unavailable):
                await call()
        await vm.stop()
        assert (await vm.wait()).kind is VmExitKind.VMM_DIED

    async def test_stop_is_shared_and_survives_a_caller_that_gives_up(self, rig: Rig) -> None:
        vm = await running(rig)
        hasty = asyncio.create_task(vm.stop())
        await asyncio.sleep(0)
        hasty.cancel()

        await asyncio.gather(vm.stop(), vm.stop())

        assert (await vm.wait()).kind is VmExitKind.REQUESTED
        with pytest.raises(Unavailable):
            await vm.start()

    @pytest.mark.parametrize("what", ["kernel", "initrd"])
    async def test_a_missing_file_is_named_and_nothing_is_made(self, rig: Rig, what: str) -> None:
        vm = rig.hypervisor()
        config = rig.config()
        missing: dict[str, Any] = {what: "/none/such"}

        with pytest.raises(FailedPrecondition, match=r"/none/such.*ENOENT"):
            await vm.create(replace(config, boot=replace(config.boot, **missing)))

        assert rig.ledger.history == []
        with pytest.raises(FailedPrecondition):
            await vm.wait()
        await vm.stop()

    @pytest.mark.parametrize("after", [0, 1])
    async def test_a_ledger_that_cannot_be_written_leaves_nothing_running(self, rig: Rig, after: int) -> None:
        full = FakeLedger(rig.ledger.undo, full_after=after)
        vm = rig.hypervisor(full)

        with pytest.raises(FailedPrecondition, match="ENOSPC"):
            await vm.create(rig.config())

        assert full.held == {}
        await vm.stop()

    async def test_plugged_disks_have_places_of_their_own(self, rig: Rig, tmp_path: Path) -> None:
        vm = await running(rig)

        first = await vm.plug(disk(tmp_path, "disk-1"))
        second = await vm.plug(disk(tmp_path, "disk-2"))

        assert (first.pci_path, second.pci_path) == ("02/01", "02/02")
        with pytest.raises(AlreadyExists, match="disk-1"):
            await vm.plug(disk(tmp_path, "disk-1"))
        with pytest.raises(NotFound, match="disk-3"):
            await vm.unplug("disk-3")
        with pytest.raises(FailedPrecondition, match="/none/such"):
            await vm.plug(plain_disk("disk-4", "/none/such"))
        await vm.stop()

    async def test_scsi_disks_share_a_controller_and_have_addresses_of_their_own(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        scsi: dict[str, Any] = {"bus": DiskBus.VIRTIO_SCSI, "serial": "vol-1", "discard": True}

        controller = ScsiController(queues=0, queue_size=0, iothread="disks")
        vm = await running(rig, replace(rig.config(), scsi=controller))

        first = await vm.plug(disk(tmp_path, "disk-1", **scsi))
        second = await vm.plug(disk(tmp_path, "disk-2", **scsi))
        third = await vm.plug(disk(tmp_path, "disk-3"))

        assert (first.pci_path, third.pci_path) == (second.pci_path, "02/01")
        assert (first.scsi_address, second.scsi_address, third.scsi_address) == ("0:0", "0:1", "")
        await vm.stop()

    async def test_without_a_controller_there_are_no_scsi_disks(self, rig: Rig, tmp_path: Path) -> None:
        vm = await running(rig)

        with pytest.raises(FailedPrecondition, match="'disk-1': the vm was made without a SCSI controller"):
            await vm.plug(disk(tmp_path, "disk-1", bus=DiskBus.VIRTIO_SCSI))
        await vm.stop()

    async def test_a_disk_that_has_grown_is_resized_by_its_name(self, rig: Rig, tmp_path: Path) -> None:
        vm = await running(rig)
        grown = disk(tmp_path, "disk-1")
        await vm.plug(grown)
        os.truncate(grown.path, 4 << 20)

        await vm.resize_disk("disk-1", 4 << 20)

        with pytest.raises(NotFound, match="disk-2"):
            await vm.resize_disk("disk-2", 1)
        await vm.stop()

    async def test_what_was_not_made_room_for_is_not_offered(self, rig: Rig, tmp_path: Path) -> None:
        config = rig.config()
        small = replace(
            config, bridges=0, memory=replace(config.memory, max_mib=0), cpu=replace(config.cpu, max_vcpus=1)
        )
        vm = await running(rig, small)

        offered = vm.capabilities()
        assert not any((offered.block_hotplug, offered.network_hotplug, offered.cpu_hotplug, offered.memory_hotplug))
        with pytest.raises(Unimplemented):
            await vm.plug(disk(tmp_path, "disk-1"))
        with pytest.raises(Unimplemented):
            await vm.resize_memory(512)
        assert await vm.resize_vcpus(4) == 1
        await vm.stop()

    async def test_vcpus_grow_to_the_maximum(self, rig: Rig) -> None:
        vm = await running(rig)
        assert vm.capabilities().cpu_hotplug

        assert await vm.resize_vcpus(1) == 1
        assert await vm.resize_vcpus(8) == 2
        assert len(set(await vm.vcpu_thread_ids())) == 2
        with pytest.raises(InvalidArgument):
            await vm.resize_vcpus(0)
        await vm.stop()

    async def test_memory_grows_by_whole_blocks_up_to_the_maximum(self, rig: Rig) -> None:
        vm = await running(rig)
        assert vm.capabilities().memory_hotplug

        assert await vm.resize_memory(100) == 256
        assert await vm.resize_memory(300) == 384
        assert await vm.resize_memory(384) == 384
        with pytest.raises(ResourceExhausted):
            await vm.resize_memory(1025)
        assert await vm.resize_memory(1024) == 1024
        await vm.stop()

    async def test_what_is_saved_names_the_vm(self, rig: Rig) -> None:
        vm = await running(rig)

        saved = vm.saved()

        assert saved["UUID"] == rig.config().uuid
        assert saved["Pid"] == vm.pid
        assert set(saved) >= {"Type", "APISocket"}
        await vm.stop()
