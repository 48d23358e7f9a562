"""VFIO nodes in a made-up sysfs: groups, functions, drivers, and giving a function to another driver and back."""

from contextlib import suppress
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.devices.host.vfio import Write, bind, driver_of, rebind, vfio_node
from tests.fakes.vfio import AUDIO, BRIDGE, NIC, FakeSysfs

ADDRESS = "0000:65:00.0"


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


@pytest.mark.parametrize("former", ["nvidia", ""])
def test_a_function_is_bound_and_its_former_driver_told(former: str, sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver=former)

    assert bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write) == former
    assert sysfs.state(ADDRESS) == ("vfio-pci", "vfio-pci")
    assert bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write) == "vfio-pci"


@pytest.mark.parametrize("former", ["nvidia", ""])
@pytest.mark.parametrize("steps", range(4))
def test_a_binding_interrupted_anywhere_is_undone(steps: int, former: str, sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver=former)

    with suppress(Interrupted):
        bind(ADDRESS, sys=str(sysfs.root), write=interrupted_after(steps, sysfs.write))
    for _ in range(2):
        rebind(ADDRESS, former, sys=str(sysfs.root), write=sysfs.write)

    assert sysfs.state(ADDRESS) == (former, "")


@pytest.mark.parametrize("steps", range(3))
def test_an_undo_interrupted_anywhere_is_finished_by_the_next(steps: int, sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver="nvidia")
    bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write)

    with suppress(Interrupted):
        rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=interrupted_after(steps, sysfs.write))
    rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=sysfs.write)

    assert sysfs.state(ADDRESS) == ("nvidia", "")


def test_a_binding_that_goes_on_during_its_undo_does_not_win(sysfs: FakeSysfs) -> None:
    """A shim may be killed in the middle of one, and `delete` look before its last write is through."""
    sysfs.function(ADDRESS, driver="nvidia")
    with suppress(Interrupted):
        bind(ADDRESS, sys=str(sysfs.root), write=interrupted_after(2, sysfs.write))

    def after_the_last_step_of_bind(path: str, text: str) -> None:
        if path.endswith("driver_override"):
            sysfs.write(f"{sysfs.root}/bus/pci/drivers_probe", ADDRESS)
        sysfs.write(path, text)

    rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=after_the_last_step_of_bind)

    assert sysfs.state(ADDRESS) == ("nvidia", "")


def test_a_function_that_vfios_driver_keeps_is_named(sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver="nvidia")
    bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write)

    with pytest.raises(FailedPrecondition, match=rf"bind {ADDRESS} to 'nvidia': vfio-pci has kept it"):
        rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=lambda _path, _text: None)


class Interrupted(Exception):
    pass


def interrupted_after(steps: int, write: Write) -> Write:
    left = iter(range(steps))

    def limited(path: str, text: str) -> None:
        if next(left, None) is None:
            raise Interrupted
        write(path, text)

    return limited


def test_a_function_that_another_driver_has_by_now_stays_with_it(sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver="nvidia")
    bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write)
    sysfs.give(ADDRESS, "igb_uio")

    rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=sysfs.write)

    assert sysfs.state(ADDRESS) == ("igb_uio", "igb_uio")


def test_a_function_that_has_left_or_was_vfios_before_needs_nothing(sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS)

    rebind(ADDRESS, "vfio-pci", sys=str(sysfs.root), write=sysfs.write)
    rebind("0000:ff:00.0", "nvidia", sys=str(sysfs.root), write=sysfs.write)

    assert sysfs.state(ADDRESS) == ("vfio-pci", "")
    assert driver_of("0000:ff:00.0", sys=str(sysfs.root)) == ""
    undo_entry(LedgerEntry(kind=ResourceKind.VFIO, key="ffff:ff:1f.7", detail={"driver": "nvidia"}))


def test_a_driver_that_does_not_take_the_function_is_named(sysfs: FakeSysfs) -> None:
    sysfs.function(ADDRESS, driver="nvidia")
    sysfs.loaded.remove("vfio-pci")

    with pytest.raises(FailedPrecondition, match=r"bind 0000:65:00\.0 to 'vfio-pci': 'no driver' .*modprobe vfio-pci"):
        bind(ADDRESS, sys=str(sysfs.root), write=sysfs.write)
    sysfs.loaded.clear()
    with pytest.raises(FailedPrecondition, match=r"bind 0000:65:00\.0 to 'nvidia': no driver took it"):
        rebind(ADDRESS, "nvidia", sys=str(sysfs.root), write=sysfs.write)


def test_a_sysfs_that_refuses_names_function_and_driver(sysfs: FakeSysfs) -> None:
    folder = sysfs.function(ADDRESS, driver="nvidia")
    (folder / "driver_override").unlink()
    (folder / "driver_override").mkdir()

    with pytest.raises(FailedPrecondition, match=r"bind 0000:65:00\.0 to 'vfio-pci'"):
        bind(ADDRESS, sys=str(sysfs.root))
