"""Disks in the terms of Kata's state file: every key is one Kata has."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.vm import BlockDevice, GuestLocation
from pyshim.pod.plan.kata_state import kata_device
from pyshim.pod.snapshot import AFTER_REPLY_S
from pyshim.resources.volumes.plan.disks import disk, served_disk
from tests.fakes.inputs import config
from tests.unit.pod.conftest import DOCUMENT, MEMBER, SANDBOX, Stack
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
    make: Callable[[Config], BlockDevice], kind: str, where: str, what: dict[str, object]
) -> None:
    found: Any = kata_device(make(config(vhost_user_reconnect_timeout_sec=3)), PLACE, 2)

    check(found, DEVICE_STATE)
    assert (found["Type"], found["RefCount"], found["DriverOptions"]["pci-path"]) == (kind, 2, "02/01")
    assert what.items() <= found[where].items()
    assert KINDS & found.keys() == {where}


async def test_katas_own_restore_of_the_sandbox_succeeds(stack: Stack) -> None:
    """Kata refuses an image beside an initrd and a container without a bundle, and then removes the state."""

    stack.document = {"hypervisor": {"qemu": {**DOCUMENT["hypervisor"]["qemu"], "initrd": "/initrd"}}}
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    await stack.run("app", ["sleep"], annotations=MEMBER)
    await asyncio.sleep(2 * AFTER_REPLY_S)

    saved = stack.records[-1].snapshots[-1]

    assert (saved.hypervisor_config["ImagePath"], saved.hypervisor_config["InitrdPath"]) == ("/i", "")
    kata = "io.katacontainers.pkg.oci."
    assert [
        (each.annotations[f"{kata}bundle_path"], each.annotations[f"{kata}container_type"]) for each in saved.containers
    ] == [("/bundles/c1", "pod_sandbox"), ("/bundles/app", "pod_container")]
