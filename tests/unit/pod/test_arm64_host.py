"""A node with arm64: its facts, the configuration it makes of a file, the plan, and what it refuses by name."""

import os
from pathlib import Path
from typing import Any

import pytest

from pyshim.config.effective import examine
from pyshim.config.load import typed
from pyshim.config.sources import Source, read_source
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.task import RuntimeOptions
from pyshim.model.vm import ImageDriver, LocalVm
from tests.fakes.inputs import BOOTABLE, host, spec
from tests.fakes.sandbox_plans import planned
from tests.unit.pod.conftest import Stack

CONFIGS = Path(__file__).parents[3] / "configs"
ARM64 = host(architecture="aarch64", kvm_usable=True, kvm_reason="'/dev/kvm' makes VMs")
LIMITS = {"resources": {"cpu": {"quota": 250_000, "period": 100_000}, "memory": {"limit": 512 << 20}}}


def config(architecture: str = "aarch64", runtime: dict[str, Any] | None = None, **qemu: Any) -> Config:
    tables = {"hypervisor": {"qemu": {**BOOTABLE, "path": "", **qemu}}, "agent": {}, "runtime": runtime or {}}
    return typed(examine(Source(path="/etc/test.toml", directory="/etc", document=tables), "", architecture))


def vm(configuration: Config, **changes: Any) -> LocalVm:
    made = planned(configuration, ARM64, spec(linux=LIMITS), **changes).vm
    assert isinstance(made, LocalVm)
    return made


@pytest.mark.parametrize(
    ("architecture", "machine_type", "program"),
    [
        ("aarch64", "virt", "/usr/bin/qemu-system-aarch64"),
        ("x86_64", "q35", "/usr/bin/qemu-system-x86_64"),
        ("riscv64", "q35", "/usr/bin/qemu-system-x86_64"),  # refused later, when the host is looked at
    ],
)
def test_the_shipped_file_has_the_machine_and_the_qemu_of_its_node(
    architecture: str, machine_type: str, program: str
) -> None:
    options = RuntimeOptions(config_path=str(CONFIGS / "configuration-qemu.toml"), config_body=b"")

    found = typed(examine(read_source(options, {}), "", architecture)).hypervisor

    assert found.machine_type == machine_type
    assert found.path == program or not os.path.exists(program)


def test_a_vm_has_the_hosts_cpu_a_root_disk_and_katas_parameters() -> None:
    made = vm(config(disable_image_nvdimm=False))

    assert (made.machine_type, made.cpu.accelerator, made.cpu.model) == ("virt", Accelerator.KVM, "host,pmu=off")
    assert made.boot.image_driver is ImageDriver.VIRTIO_BLK
    assert {"iommu.passthrough=0", "earlycon", "console=hvc0", "root=/dev/vda1"} <= {*made.boot.kernel_params}
    x86_only = ("tsc=", "i8042.", "no_timer_check", "reboot=k", "earlyprintk=", "lpj=", "tsc_early_khz=")
    assert not [param for param in made.boot.kernel_params if param.startswith(x86_only)]


def test_an_emulated_vm_has_no_clock_of_x86() -> None:
    emulated = host(architecture="x86_64", tsc_khz=2_000_000)

    made = planned(config("x86_64", machine_type="virt", accelerator="tcg", kernel_hz=250), emulated, spec()).vm

    assert isinstance(made, LocalVm)
    assert made.cpu.model == "max,pauth-impdef=on"
    assert not [param for param in made.boot.kernel_params if param.startswith(("lpj=", "tsc"))]


def test_memory_grows_and_vcpus_are_those_of_the_limits() -> None:
    """By virtio-mem, since without UEFI the guest finds no ACPI; with UEFI as the file says."""
    growing = {"static_sandbox_resource_mgmt": False}

    plain, uefi = (vm(config(runtime=growing, default_maxmemory=4096, firmware=path)) for path in ("", "/AAVMF.fd"))

    assert (plain.cpu.boot_vcpus, plain.cpu.max_vcpus) == (4, 4)  # the default one, and 2.5 of the limit
    assert (plain.memory.boot_mib, plain.memory.max_mib, plain.memory.virtio_mem) == (2048, 4096, True)
    assert "rootflags=dax" not in uefi.boot.kernel_params  # as in Kata
    assert (uefi.memory.virtio_mem, uefi.memory.slots, uefi.boot.image_driver) == (False, 10, ImageDriver.PMEM)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"machine_type": "q35"},
            "machine_type \"q35\" in '/etc/test.toml' is of x86_64, and this host's processor is",
        ),
        ({"machine_type": "microvm"}, 'machine_type "microvm" .* aarch64, with virt'),
        ({"path": "/opt/qemu-system-x86_64"}, 'qemu-system-x86_64 has no machine type "virt", which is of aarch64'),
        ({"enable_iommu": True}, "read enable_iommu in '/etc/test.toml': virt has no IOMMU"),
        (
            {"confidential_guest": True, "shared_fs": "none", "firmware": "/f", "confidential_technology": "tdx"},
            'machine_type = "virt": only q35 can be confidential, and Arm\'s CCA is not supported',
        ),
        (
            {"confidential_guest": True, "shared_fs": "none", "firmware": "/f", "sev_snp_guest": True},
            "only q35 can be confidential, and Arm's CCA is not supported",
        ),
    ],
    ids=["q35", "microvm", "qemu", "iommu", "tdx", "snp"],
)
def test_what_an_arm64_node_has_not_is_refused_by_name(keys: dict[str, Any], text: str) -> None:
    with pytest.raises((InvalidArgument, FailedPrecondition), match=text):
        vm(config(**keys))


def test_a_node_of_a_third_processor_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition, match=r"is of x86_64, and this host's processor is riscv64, with none"):
        planned(config("riscv64"), host(architecture="riscv64"), spec())


@pytest.mark.parametrize(("key", "path"), [("kernel", "/k"), ("initrd", "/ird")])
async def test_a_boot_file_of_another_processor_is_refused_before_anything_is_made(
    key: str, path: str, stack: Stack
) -> None:
    stack.document = {"hypervisor": {"qemu": {**BOOTABLE, "initrd": "/ird"}}}
    stack.host.architectures = {"/k": "x86_64", "/ird": "x86_64", path: "aarch64"}

    with pytest.raises(
        InvalidArgument, match=f"start vm: {key} '{path}' in .* is for aarch64, and .* q35 is of x86_64"
    ):
        await stack.pod.create(stack.request("c1", ["sleep"]))

    assert stack.pod.is_empty
