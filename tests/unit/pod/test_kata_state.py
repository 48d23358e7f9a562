"""Disks in the terms of Kata's state file: every key is one Kata has."""

from collections.abc import Callable
from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.vm import BlockDevice, GuestLocation
from pyshim.pod.plan.kata_state import kata_device
from pyshim.resources.volumes.plan.disks import disk, served_disk
from pyshim.state.kata_shape import DEVICE_STATE, filled

SHAPES: dict[str, Any] = {name: DEVICE_STATE[name] for name in ("BlockDrive", "VhostUserDev")}
PLACE = GuestLocation(pci_path="02/01")


def plain(config: Config) -> BlockDevice:
    return disk(config, device_id="d", path="/dev/vg/lv", read_only=True)


def served(config: Config) -> BlockDevice:
    return served_disk(config, device_id="d", socket="/store/block/sockets/d")


@pytest.mark.parametrize(
    ("make", "kind", "where", "what"),
    [
        (plain, "block", "BlockDrive", {"File": "/dev/vg/lv", "ReadOnly": True}),
        (served, "vhost-user-blk-pci", "VhostUserDev", {"SocketPath": "/store/block/sockets/d", "ReconnectTime": 3}),
    ],
)
def test_a_disk_of_each_kind_has_katas_keys(
    make: Callable[[Config], BlockDevice],
    kind: str,
    where: str,
    what: dict[str, object],
    config: Callable[..., Config],
) -> None:
    found = kata_device(make(config(vhost_user_reconnect_timeout_sec=3)), PLACE, 2)

    full = filled(found, DEVICE_STATE, "Devices[0]")
    assert isinstance(full, dict)
    assert set(full) <= set(DEVICE_STATE), "none but Kata's"
    assert set(full[where]) <= set(SHAPES[where].item)
    assert (full["Type"], full["RefCount"], full["DriverOptions"]["pci-path"]) == (kind, 2, "02/01")
    assert what.items() <= full[where].items()
    assert [full.get(each) for each in SHAPES.keys() - {where}] == [None]
