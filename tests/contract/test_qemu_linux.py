"""The QEMU driver with Linux in it: what only a guest's kernel can confirm."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.vm import LocalVm, VmExitKind
from tests.fakes.disks import disk as plain_disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import OURS, vm_config

QEMU = "/usr/bin/qemu-system-x86_64"
GUEST = Path(__file__).parents[2] / ".build" / "guest-bookworm"
"""Debian 12's, because its kernel takes plugged vCPUs under emulation too."""
BOOT_S = 150.0
"""For a boot under emulation on a machine however busy."""
PARAMS = ("console=ttyS0", "panic=1", "reboot=k", "cryptomgr.notests", "root=/dev/vda1")

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(220),
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}"),
    pytest.mark.skipif(
        not (GUEST / "vmlinuz").exists(),
        reason=f"needs {GUEST} (hint: make guest GUEST='--suite bookworm --out {GUEST}')",
    ),
]


def linux(tmp_path: Path, *extra_params: str) -> LocalVm:
    """The project's own guest, talkative on its serial port."""
    config = vm_config(uuid=OURS, vm_dir=str(tmp_path / "vm"), share=None, hypervisor_path=QEMU)
    boot = replace(
        config.boot,
        kernel=str(GUEST / "vmlinuz"),
        initrd=str(GUEST / "initrd.img"),
        image=str(GUEST / "rootfs.img"),
        kernel_params=(*PARAMS, "agent.server_addr=serial:///dev/virtio-ports/org.pykata.agent.0", *extra_params),
    )
    return replace(config, boot=boot)


async def console_says(vm: QemuVm, vm_dir: str, text: str) -> None:
    """The guest has printed `text`."""
    log = f"{vm_dir}/console.log"
    async with asyncio.timeout(BOOT_S):
        while text not in await asyncio.to_thread(_read, log):  # noqa: ASYNC110 - the file has no event for us
            await asyncio.sleep(0.1)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


@pytest.fixture
def vm(runner: asyncio.Runner) -> Iterator[QemuVm]:
    ledger, children = FakeLedger(undo_entry), Children()
    vm = QemuVm(ledger=ledger, children=children)
    yield vm
    runner.run(vm.stop())
    assert ledger.held == {}
    assert children.alive == ()


async def test_a_guest_sees_disks_cpus_and_memory_come_and_disks_go(tmp_path: Path, vm: QemuVm) -> None:
    config = linux(tmp_path)
    disk_file = tmp_path / "disk.img"
    disk_file.write_bytes(bytes(3 << 20))
    disk = plain_disk("disk-1", disk_file, read_only=True)

    await vm.create(config)
    await vm.start()
    await console_says(vm, config.vm_dir, "erofs: (device vda1): mounted")

    first = await vm.plug(disk)
    await console_says(vm, config.vm_dir, "pci 0000:01:01.0: [1af4:1001]")
    await console_says(vm, config.vm_dir, "6144 512-byte logical blocks")
    await vm.unplug(disk.id)
    second = await vm.plug(replace(disk, id="disk-2"))
    assert first == second
    assert first.pci_path == "02/01"

    assert await vm.resize_vcpus(2) == 2
    await console_says(vm, config.vm_dir, "CPU1 has been hot-added")
    assert await vm.resize_vcpus(1) == 2, "nothing is taken away under TCG"
    assert await vm.resize_memory(500) == 512

    await vm.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await vm.wait()
    await vm.resume()


async def test_a_kernel_that_finds_no_root_panics_with_its_words(tmp_path: Path, vm: QemuVm) -> None:
    config = linux(tmp_path)
    broken = tmp_path / "initrd"
    broken.write_bytes(os.urandom(4096))

    await vm.create(replace(config, boot=replace(config.boot, initrd=str(broken), image=None)))
    await vm.start()
    async with asyncio.timeout(BOOT_S):
        ended = await vm.wait()

    assert ended.kind is VmExitKind.GUEST_PANIC
    assert "Kernel panic - not syncing" in ended.reason
    assert "VFS: Unable to mount root fs" in ended.reason


async def test_a_quiet_kernel_that_dies_before_its_console_driver_is_heard_on_the_serial_port(
    tmp_path: Path, vm: QemuVm
) -> None:
    config = linux(tmp_path)
    # As pyshim/pod/plan/kernel_params.py has it: nothing but errors is printed, and hvc0 does not exist yet.
    params = ("earlyprintk=ttyS0,115200", "console=hvc0", "quiet", "panic=1", "reboot=k")
    broken = tmp_path / "initrd"
    broken.write_bytes(os.urandom(4096))

    boot = replace(config.boot, kernel_params=params, initrd=str(broken), image=None)
    await vm.create(replace(config, boot=boot))
    await vm.start()
    async with asyncio.timeout(BOOT_S):
        ended = await vm.wait()

    assert ended.kind is VmExitKind.GUEST_PANIC
    assert "VFS: Unable to mount root fs" in ended.reason
