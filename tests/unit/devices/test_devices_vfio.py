"""VFIO nodes in a made-up sysfs: groups, functions, drivers, and giving a function to another driver and back."""

from pathlib import Path

import pytest

from pyshim.host.release import release
from pyshim.host.vfio import bind, driver_of, rebind, vfio_node
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.fakes.vfio import AUDIO, BRIDGE, NIC, FakeSysfs


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "sys")


def test_a_group_is_given_whole_but_for_its_bridges(sysfs: FakeSysfs) -> None:
    sysfs.function("0000:65:00.0", group="12")
    sysfs.function("0000:65:00.1", AUDIO, group="12")
    sysfs.function("0000:64:00.0", BRIDGE, group="12", driver="pcieport")

    node = vfio_node("/dev/vfio/12", sys=str(sysfs.root))

    assert [function.address for function in node.functions] == ["0000:65:00.0", "0000:65:00.1"]
    assert (node.functions[0].vendor, node.functions[0].device, node.functions[0].class_code) == (
        "0x10de",
        "0x2331",
        "0x030200",
    )
    assert (node.iommufd, node.number) == (False, "12")


def test_a_function_has_its_own_node(sysfs: FakeSysfs) -> None:
    sysfs.function("0000:17:00.1", NIC, driver="mlx5_vfio_pci", vfio="vfio3")

    node = vfio_node("/dev/vfio/devices/vfio3", sys=str(sysfs.root))

    assert [function.address for function in node.functions] == ["0000:17:00.1"]
    assert (node.iommufd, node.number) == (True, "3")


def test_a_group_that_is_only_partly_bound_names_what_is_missing(sysfs: FakeSysfs) -> None:
    sysfs.function("0000:65:00.0", group="12")
    sysfs.function("0000:65:00.1", AUDIO, group="12", driver="snd_hda_intel")
    sysfs.function("0000:65:00.2", "0x0c0330", group="12", driver="")

    with pytest.raises(FailedPrecondition) as refused:
        vfio_node("/dev/vfio/12", sys=str(sysfs.root))
    assert str(refused.value) == (
        "use '/dev/vfio/12': not all of it is held by vfio-pci: "
        "0000:65:00.1 by snd_hda_intel, 0000:65:00.2 by no driver"
    )


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/dev/vfio/99", NotFound, "this host has no IOMMU group 99"),
        ("/dev/vfio/devices/vfio9", NotFound, "this host has no VFIO device 'vfio9'"),
        ("/dev/vfio/noiommu-0", InvalidArgument, "without an IOMMU nothing can be passed through"),
        ("/dev/vfio/vfio", InvalidArgument, "it is neither"),
        ("/dev/vfio/../sda", InvalidArgument, "it is neither"),
        ("/dev/vfio/5", FailedPrecondition, "nothing but bridges is in it"),
    ],
)
def test_nodes_that_cannot_be_used(path: str, kind: type[ShimError], text: str, sysfs: FakeSysfs) -> None:
    sysfs.function("0000:64:00.0", BRIDGE, group="5", driver="pcieport")

    with pytest.raises(kind, match=f"use '{path}': ") as refused:
        vfio_node(path, sys=str(sysfs.root))
    assert text in str(refused.value)


def written(sysfs: FakeSysfs, folder: Path, former: str) -> tuple[str, str, str]:
    return (
        (folder / "driver_override").read_text(),
        (sysfs.root / "bus/pci/drivers" / former / "unbind").read_text() if former else "",
        (sysfs.root / "bus/pci/drivers_probe").read_text(),
    )


@pytest.mark.parametrize("former", ["nvidia", ""])
def test_a_function_is_bound_and_its_former_driver_told(former: str, sysfs: FakeSysfs) -> None:
    folder = sysfs.function("0000:65:00.0", driver=former)

    assert bind("0000:65:00.0", sys=str(sysfs.root)) == former
    assert written(sysfs, folder, former) == ("vfio-pci", "0000:65:00.0" if former else "", "0000:65:00.0")


def test_a_function_goes_back_to_the_driver_it_had(sysfs: FakeSysfs) -> None:
    folder = sysfs.function("0000:65:00.0")

    rebind("0000:65:00.0", "nvidia", sys=str(sysfs.root))

    assert written(sysfs, folder, "vfio-pci") == ("\n", "0000:65:00.0", "0000:65:00.0")


def test_binding_and_its_undo_are_idempotent(sysfs: FakeSysfs) -> None:
    folder = sysfs.function("0000:65:00.0")

    assert bind("0000:65:00.0", sys=str(sysfs.root)) == "vfio-pci"
    rebind("0000:65:00.0", "vfio-pci", sys=str(sysfs.root))
    rebind("0000:ff:00.0", "nvidia", sys=str(sysfs.root))

    assert written(sysfs, folder, "vfio-pci") == ("\n", "", "")
    assert driver_of("0000:ff:00.0", sys=str(sysfs.root)) == ""
    # A function that has left the machine has nothing to undo.
    release(LedgerEntry(kind=ResourceKind.VFIO, key="ffff:ff:1f.7", detail={"driver": "nvidia"}))


def test_a_sysfs_that_refuses_names_function_and_driver(sysfs: FakeSysfs) -> None:
    folder = sysfs.function("0000:65:00.0", driver="nvidia")
    (folder / "driver_override").unlink()
    (folder / "driver_override").mkdir()

    with pytest.raises(FailedPrecondition, match=r"bind 0000:65:00\.0 to 'vfio-pci'"):
        bind("0000:65:00.0", sys=str(sysfs.root))
