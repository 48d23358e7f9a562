"""A VM of aarch64: its argv as golden files, beside Kata's, and in the grammar of qemu-system-aarch64.

After a wanted change: `PYSHIM_UPDATE_GOLDEN=1 pytest tests/unit/hypervisors/test_arm64.py`, then read the diff.
"""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import check_config
from hypervisors.qemu.hotplug import capabilities_of
from hypervisors.qemu.pci import BridgeSlots
from pyshim.model.architecture import AARCH64
from pyshim.model.errors import InvalidArgument, ResourceExhausted
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver, LocalVm, PciLayout, ScsiController, VsockChannel
from tests.fakes.vm_config import nic, vm_config, with_boot, with_memory
from tests.grammar.check import AARCH64_TABLES, problems, tables
from tests.grammar.introspect import introspected

from .test_accepted import accepted, runnable
from .test_cmdline import GOLDEN, argv_of, as_text

QEMU = AARCH64.qemu_paths[0]
UEFI = "/usr/share/AAVMF/AAVMF_CODE.fd"
needs_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU} (package qemu-system-arm)")


def _virt(**changes: object) -> LocalVm:
    plain = vm_config(machine_type="virt", hypervisor_path=QEMU, **changes)
    cpu = replace(plain.cpu, model=AARCH64.emulated_cpu, max_vcpus=1)
    return with_memory(replace(plain, cpu=cpu), virtio_mem=True)


def _kvm(config: LocalVm) -> LocalVm:
    return replace(config, cpu=replace(config.cpu, accelerator=Accelerator.KVM, model="host,pmu=off"))


CONFIGS = {
    "virtiofs-serial-tcg": _virt(),
    "vsock-kvm": _kvm(_virt(agent_channel=VsockChannel(port=1024))),
    "two-bridges-two-nics": _virt(bridges=2, nics=(nic(0, taps=(40, 41), vhosts=(50, 51)), nic(1, taps=(42,), mtu=0))),
    "scsi": _virt(scsi=ScsiController(queues=2, queue_size=64, iothread="scsi")),
    "uefi-pmem-dimms": with_memory(
        with_boot(_virt(), firmware=UEFI, image_driver=ImageDriver.PMEM, initrd=None), virtio_mem=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_argv_is_the_golden_one(name: str) -> None:
    check_config(CONFIGS[name])
    file = GOLDEN / "aarch64" / f"{name}.txt"
    text = as_text(argv_of(CONFIGS[name]))
    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    assert text == file.read_text()


def test_every_golden_file_belongs_to_a_config() -> None:
    assert sorted(file.stem for file in (GOLDEN / "aarch64").glob("*.txt")) == sorted(CONFIGS)


KATAS = {
    # What Kata's Go runtime says on arm64 (qemu_arm64.go, qemu_arch_base.go, qemu.go), and what says the same here.
    "-machine virt": "-machine virt",
    "usb=off": "",  # QEMU's default
    "accel=kvm": "accel=kvm",
    "gic-version=host": "gic-version=max",  # the host's with KVM, and the newest under emulation
    "-cpu host,pmu=off": "-cpu host,pmu=off",
    "-device pci-bridge,": "-device x3130-upstream,",  # Kata's takes no device here: its root ports do
    "-device pcie-root-port,": "-device pcie-root-port,",
    "-device virtio-serial-pci,": "-device virtio-serial-pci,",
    "-device virtconsole,": "-device virtconsole,",
    "-device vhost-vsock-pci,": "-device vhost-vsock-pci,",
    "-device vhost-user-fs-pci,": "-device vhost-user-fs-pci,",
    "-device virtio-rng-pci,": "-device virtio-rng-pci,",
    "virtio-mem-pci": "-device virtio-mem-pci,",  # Kata plugs it into the running VM
    "-global kvm-pit.lost_tick_policy=discard": "",  # there is no such timer: QEMU ignores it
    "-rtc base=utc,": "-rtc base=utc,",
    "-no-reboot": "-no-reboot",
}


@pytest.mark.parametrize("kata", KATAS)
def test_what_kata_says_is_said_or_left_out_for_a_reason(kata: str) -> None:
    text = as_text(argv_of(CONFIGS["vsock-kvm"]))

    assert KATAS[kata] in text
    assert KATAS[kata] or kata not in text


@pytest.mark.parametrize("version", ["7.2", "10.0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_version_knows_the_words(name: str, version: str) -> None:
    # The model `host` is only in a QEMU that runs on the processor itself: the tables are not from one.
    words = tuple(word.replace("host,pmu=off", "max,pmu=off") for word in argv_of(CONFIGS[name]))

    assert problems(words, tables(AARCH64_TABLES)[version]) == []


@needs_qemu
def test_introspection_gives_what_its_table_holds() -> None:
    grammar = introspected(QEMU)
    known = tables(AARCH64_TABLES).get(grammar.version)
    if known is None:
        pytest.skip(f"no table of qemu-system-aarch64 {grammar.version}")

    assert (grammar.objects, grammar.devices, grammar.machine) == (known.objects, known.devices, known.machine)


@pytest.mark.root
@needs_qemu
@pytest.mark.parametrize("name", ["virtiofs-serial-tcg", "scsi", "uefi-pmem-dimms"])
def test_the_installed_qemu_makes_the_machine(name: str, tmp_path: Path) -> None:
    config = runnable(CONFIGS[name], tmp_path)
    if CONFIGS[name].boot.firmware and os.path.exists(UEFI):
        config = with_boot(config, firmware=UEFI)

    asyncio.run(accepted(replace(config, share=None), tmp_path))


def test_a_switch_has_a_port_for_each_device_and_vcpus_stay() -> None:
    config = _virt(bridges=1)
    slots = BridgeSlots(config.machine, 1)
    taken = [config.machine.place_behind(*slots.take(f"d{index}")) for index in range(16)]

    assert taken[0] == ("pci-bridge-0-1", 0)
    assert all(f"id={bus}," in as_text(argv_of(config)) for bus, _ in taken)
    with pytest.raises(ResourceExhausted, match="no free slot"):
        slots.take("one more")
    can = capabilities_of(replace(config, cpu=replace(config.cpu, max_vcpus=4)))
    assert (can.block_hotplug, can.network_hotplug, can.memory_hotplug, can.cpu_hotplug) == (True, True, True, False)


def test_an_iommu_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="virt has no IOMMU"):
        check_config(replace(_virt(), pci=PciLayout(iommu=True)))
