"""Disks in the terms of Kata's state file: every key is one Kata has."""

from collections.abc import Callable
from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.vm import BlockDevice, GuestLocation
from pyshim.pod.plan.kata_state import kata_device
from pyshim.resources.volumes.plan.disks import disk, served_disk
from tests.unit.state.kata_shape import DEVICE_STATE, check

KINDS = {"BlockDrive", "VhostUserDev"}
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
    found: Any = kata_device(make(config(vhost_user_reconnect_timeout_sec=3)), PLACE, 2)

    check(found, DEVICE_STATE)
    assert (found["Type"], found["RefCount"], found["DriverOptions"]["pci-path"]) == (kind, 2, "02/01")
    assert what.items() <= found[where].items()
    assert KINDS & found.keys() == {where}
