"""Ports and passed-through devices: the words, compared with the properties QEMU lists, and accepted by QEMU itself."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu import pci
from hypervisors.qemu.cmdline import check_config, qemu_argv
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.errors import Internal, InvalidArgument, ResourceExhausted, ShimError, Unimplemented
from pyshim.model.vm import EmulatedDevice, PciDevice, PciLayout, PortKind, VfioDevice
from pyshim.resources.devices.plan.pci_topology import pci_layout
from tests.fakes.inputs import config
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import HALT
from tests.fakes.vm_config import bootable, vm_config
from tests.grammar.check import problems, tables

QEMU = "/usr/bin/qemu-system-x86_64"
# device-list-properties and query-qmp-schema of each version.
GRAMMAR: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "pci" / "properties.json").read_text())
needs_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")

GPU = VfioDevice(id="0000:65:00.0", host_address="0000:65:00.0", iommufd=False, vendor_id="0x10de", device_id="0x2331")
NIC = VfioDevice(id="vfio7", host_address="0000:17:00.1", iommufd=True)
TOYS = tuple(EmulatedDevice(id=f"toy{n}", model="edu") for n in range(3))


def layout(
    devices: tuple[PciDevice, ...] = (),
    cold: PortKind | None = PortKind.ROOT,
    hot: PortKind | None = None,
    roots: int = 0,
    switches: int = 0,
) -> PciLayout:
    asked = config(
        cold_plug_vfio=cold or "no-port",
        hot_plug_vfio=hot or "no-port",
        pcie_root_port=roots,
        pcie_switch_port=switches,
    )
    return pci_layout(asked, devices)


def test_options_of_root_ports_and_their_devices() -> None:
    found = layout((GPU, NIC))

    assert pci.ports(found) == (
        "-device",
        "pcie-root-port,id=rp0,bus=pcie.0,addr=0x1d,chassis=0,slot=29,multifunction=off,io-reserve=0",
        "-device",
        "pcie-root-port,id=rp1,bus=pcie.0,addr=0x1e,chassis=0,slot=30,multifunction=off,io-reserve=0",
    )
    # The id of the first is no name QEMU takes, so it has one made of it.
    assert pci.placed_device(found.placed[0]) == (
        "-device",
        f"vfio-pci,id={pci.function_id(GPU.id)},host=0000:65:00.0,romfile=,x-pci-vendor-id=0x10de,x-pci-device-id=0x2331,"
        "bus=rp0,addr=0x0",
    )
    assert pci.placed_device(found.placed[1]) == (
        "-object",
        "iommufd,id=iommufd-vfio7",
        "-device",
        "vfio-pci,id=pci-vfio7,host=0000:17:00.1,romfile=,iommufd=iommufd-vfio7,bus=rp1,addr=0x0",
    )


def test_options_of_a_switch() -> None:
    found = layout((GPU,), PortKind.SWITCH, switches=2)

    assert pci.ports(found)[1::2] == (
        "pcie-root-port,id=swrp0,bus=pcie.0,addr=0x1e,chassis=1,slot=30,multifunction=off,io-reserve=0",
        "x3130-upstream,id=swup0,bus=swrp0",
        "xio3130-downstream,id=swdp0,bus=swup0,addr=0x0,chassis=2,slot=0,multifunction=off",
        "xio3130-downstream,id=swdp1,bus=swup0,addr=0x1,chassis=2,slot=1,multifunction=off",
    )
    assert pci.placed_device(found.placed[0])[1].endswith(",bus=swdp0,addr=0x0")


@pytest.mark.parametrize("version", list(tables()))
def test_the_guests_iommu_precedes_every_pci_device(version: str) -> None:
    config = replace(vm_config(share=None), pci=replace(layout((GPU,)), iommu=True))

    argv = qemu_argv(config, guest_cid=3, image_bytes=1)

    devices = [argv[index + 1] for index, word in enumerate(argv) if word == "-device"]
    assert devices[0] == "intel-iommu,intremap=on,device-iotlb=on,caching-mode=on"
    assert "kernel-irqchip=split" in argv[argv.index("-machine") + 1].split(",")
    assert problems(argv, tables()[version]) == []


@pytest.mark.parametrize("version", GRAMMAR)
@pytest.mark.parametrize("device", [GPU, NIC], ids=["group", "iommufd"])
@pytest.mark.parametrize("kind", PortKind)
def test_every_version_accepts_the_options_it_can_have(version: str, device: VfioDevice, kind: PortKind) -> None:
    known = GRAMMAR[version]
    if device.iommufd and "iommufd" not in known["objects"]:
        return  # QEMU refuses it by name; iommufd came with 9.0
    found = layout((device,), kind, roots=1, switches=1)
    words = (*pci.ports(found), *pci.placed_device(found.placed[0]))

    for option, text in zip(words[::2], words[1::2], strict=True):
        name, *fields = text.split(",")
        allowed = known["devices"][name] if option == "-device" else known["objects"][name]
        unknown = {field.partition("=")[0] for field in fields} - {*allowed, "id", "bus", "addr", "x-pci-vendor-id"}
        assert unknown <= {"x-pci-device-id"}, (version, text)
    driver, hot = pci.hotplug_model(device)
    assert set(hot) <= {*known["devices"][driver], "x-pci-vendor-id", "x-pci-device-id"}


def test_qmp_gets_numbers_where_the_argv_has_hexadecimal_texts() -> None:
    assert pci.hotplug_model(GPU) == (
        "vfio-pci",
        {"host": "0000:65:00.0", "romfile": "", "x-pci-vendor-id": 0x10DE, "x-pci-device-id": 0x2331},
    )
    assert pci.backend_objects(NIC) == ({"qom-type": "iommufd", "id": "iommufd-vfio7"},)


@pytest.mark.parametrize(
    "changes",
    [
        {"machine_type": "microvm", "pci": layout(TOYS), "bridges": 0},
        {"machine_type": "microvm", "pci": layout(hot=PortKind.ROOT, cold=None), "bridges": 0},
        {"pci": PciLayout(hot_plug=PortKind.BRIDGE), "bridges": 0},
        {"machine_type": "microvm", "pci": PciLayout(iommu=True), "bridges": 0},
    ],
    ids=["cold", "hot", "bridge", "iommu"],
)
def test_a_machine_without_the_ports_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="configure vm 'pod1'"):
        check_config(replace(vm_config(share=None), **changes))


# The installed QEMU


@needs_qemu
def test_qemu_has_the_undocumented_properties() -> None:
    """Those that begin with `x-` are in no list but the help text."""
    shown = subprocess.run([QEMU, "-device", "vfio-pci,help"], capture_output=True, text=True, timeout=30, check=True)

    assert "x-pci-vendor-id=" in shown.stdout
    assert "x-pci-device-id=" in shown.stdout


@pytest.fixture
def vm(children: Children, runner: asyncio.Runner) -> Iterator[QemuVm]:
    ledger = FakeLedger(undo_entry)
    vm = QemuVm(ledger=ledger, children=children)
    yield vm
    runner.run(vm.stop())
    assert ledger.held == {}


@needs_qemu
@pytest.mark.parametrize("kind", PortKind)
@pytest.mark.parametrize(("roots", "switches"), [(0, 0), (16, 16)])
async def test_devices_have_their_planned_locations(
    kind: PortKind, roots: int, switches: int, tmp_path: Path, vm: QemuVm
) -> None:
    config = bootable(tmp_path, HALT, pci=layout(TOYS, kind, roots=roots, switches=switches), bridges=5)

    await vm.create(config)  # `create` compares every path, as the next test shows


@needs_qemu
async def test_a_device_at_another_location_is_an_error_with_its_id(tmp_path: Path, vm: QemuVm) -> None:
    found = layout(TOYS)
    wrong = replace(found.placed[1], pci_path="01/00")
    config = bootable(tmp_path, HALT, pci=replace(found, placed=(found.placed[0], wrong, found.placed[2])))

    with pytest.raises(Internal, match=r"place 'toy1' in vm 'pod1': qemu has it at 1d/00, the plan at 01/00"):
        await vm.create(config)


@needs_qemu
@pytest.mark.parametrize("kind", PortKind)
async def test_hot_plug_takes_free_ports_and_fails_without_one(kind: PortKind, tmp_path: Path, vm: QemuVm) -> None:
    config = bootable(tmp_path, HALT, pci=layout(cold=None, hot=kind, roots=2, switches=2))
    await vm.create(config)

    assert vm.capabilities().pci_hotplug
    paths = [(await vm.plug(toy)).pci_path for toy in TOYS[:2]]

    assert (
        paths
        == {
            PortKind.ROOT: ["1c/00", "1d/00"],
            PortKind.SWITCH: ["1e/00/00/00", "1e/00/01/00"],
            PortKind.BRIDGE: ["02/01", "02/02"],
        }[kind]
    )
    if kind is not PortKind.BRIDGE:
        with pytest.raises(ResourceExhausted, match=f"plug 'toy2': all 2 {kind}s are taken"):
            await vm.plug(TOYS[2])


@needs_qemu
async def test_a_missing_device_leaves_its_port_free(tmp_path: Path, vm: QemuVm) -> None:
    config = bootable(tmp_path, HALT, pci=layout(cold=None, hot=PortKind.ROOT))
    await vm.create(config)

    with pytest.raises(ShimError, match=r"ask qemu 'device_add': .*ffff:ff:1f\.7"):
        await vm.plug(VfioDevice(id="gone", host_address="ffff:ff:1f.7", iommufd=False))
    with pytest.raises(ShimError):
        await vm.plug(EmulatedDevice(id="odd", model="no-such-model"))
    assert (await vm.plug(TOYS[0])).pci_path == "1e/00"


@needs_qemu
async def test_cold_plug_of_a_missing_device_raises_qemus_error(tmp_path: Path, vm: QemuVm) -> None:
    missing = VfioDevice(id="gone", host_address="ffff:ff:1f.7", iommufd=False)
    config = bootable(tmp_path, HALT, pci=layout((missing,)))

    with pytest.raises(ShimError, match=r"start vm 'pod1'.*ffff:ff:1f\.7"):
        await vm.create(config)


@needs_qemu
async def test_hot_plug_without_a_port_is_refused(tmp_path: Path, vm: QemuVm) -> None:
    config = bootable(tmp_path, HALT)
    await vm.create(config)

    assert not vm.capabilities().pci_hotplug
    with pytest.raises(Unimplemented, match="plug 'toy0': hot_plug_vfio is \"no-port\""):
        await vm.plug(TOYS[0])
