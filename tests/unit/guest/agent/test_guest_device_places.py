"""The guest agent finds a device by its place, and writes its numbers into the spec."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oci_messages import a_spec

from guest.agent.errors import InvalidArgument
from guest.agent.net import links
from guest.agent.storage import block, devices
from guest.agent.storage.hotplug import Hotplug
from protos.agent import oci_pb2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("02", ("00", ["02.0"])),
        ("02/01", ("00", ["02.0", "01.0"])),
        ("1f.7", ("00", ["1f.7"])),
        ("02/00/01", ("00", ["02.0", "00.0", "01.0"])),
        ("20/00/02", ("20", ["00.0", "02.0"])),
    ],
)
def test_pci_paths_are_read(path: str, expected: tuple[str, list[str]]) -> None:
    assert block.pci_slots(path) == expected


@pytest.mark.parametrize("path", ["", "/", "20", "02/", "zz", "02.8", "02.", "../02", "+2", "02/0x1"])
def test_a_pci_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="PCI path"):
        block.pci_slots(path)


def test_a_function_behind_a_bridge_is_found_by_its_secondary_bus(tmp_path: Path) -> None:
    function = tmp_path / "devices/pci0000:00/0000:00:02.0/0000:05:01.0"
    function.mkdir(parents=True)
    (tmp_path / "devices/pci0000:00/0000:00:02.0/pci_bus/0000:05").mkdir(parents=True)

    assert block.pci_folder(str(tmp_path), "02/01") == str(function)
    assert block.pci_folder(str(tmp_path), "02/02") is None
    assert block.pci_folder(str(tmp_path), "03/01") is None


@pytest.mark.usefixtures("fast_clock")
async def test_a_scsi_disk_is_looked_for_by_a_controller_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "SYS", str(tmp_path))
    monkeypatch.setattr(block, "is_block", lambda _path: True)
    waiting = asyncio.create_task(block.find_block_device(Hotplug(3.0), "scsi", "0:5"))
    await asyncio.sleep(0.5)
    scan = tmp_path / "class/scsi_host/host2/scan"
    scan.parent.mkdir(parents=True)
    await asyncio.sleep(0.3)  # the kernel makes the host's directory first and its attributes later
    assert not waiting.done()
    scan.touch()

    await asyncio.sleep(0.5)
    assert scan.read_text() == "0 0 5"
    (tmp_path / "class/scsi_device/2:0:0:5/device/block/sdb").mkdir(parents=True)

    assert await waiting == "/dev/sdb"


def test_an_interface_is_found_under_its_virtio_device(tmp_path: Path) -> None:
    (tmp_path / "virtio3/net/eth7").mkdir(parents=True)

    assert links.interface_of(str(tmp_path)) == "eth7"
    assert links.interface_of(str(tmp_path / "none")) is None


def test_device_numbers_and_their_cgroup_rules_change_together() -> None:
    message = a_spec(
        Devices=[oci_pb2.LinuxDevice(Path="/dev/x", Type="b", Major=8, Minor=1)],
        Resources=oci_pb2.LinuxResources(
            Devices=[
                oci_pb2.LinuxDeviceCgroup(Allow=True, Type="b", Major=8, Minor=1),
                oci_pb2.LinuxDeviceCgroup(Allow=True, Type="c", Major=8, Minor=1),
            ],
        ),
    )

    devices.update_spec(message, {"/dev/x": ("b", 254, 16)})

    assert (message.Linux.Devices[0].Major, message.Linux.Devices[0].Minor) == (254, 16)
    assert [(one.Type, one.Major, one.Minor) for one in message.Linux.Resources.Devices] == [
        ("b", 254, 16),
        ("c", 8, 1),
    ]


def test_a_device_the_spec_does_not_have_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'/dev/y'"):
        devices.update_spec(a_spec(), {"/dev/y": ("b", 1, 1)})
