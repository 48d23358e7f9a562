"""Finds a container's devices in the guest, and replaces the spec's host numbers by the guest's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from protos.agent.agent_pb2 import Device
from protos.agent.oci_pb2 import Spec

from guest.agent.children import Children
from guest.agent.errors import InvalidArgument, NotFound, os_cause
from guest.agent.storage import passthrough
from guest.agent.storage.block import find_block_device
from guest.agent.storage.hotplug import Hotplug

DEVICE_TYPES = ("blk", "mmioblk", "nvdimm", "scsi", "vfio-pci", "vfio-pci-gk")


async def add_devices(devices: Iterable[Device], spec: Spec, *, hotplug: Hotplug, children: Children) -> dict[str, str]:
    """Each device is there, and the spec's device at its container path has the guest's numbers, as have its cgroup
    rules. Returns host -> guest address of the PCI functions among them.

    InvalidArgument names a device that the spec does not have, or of a kind this agent cannot find.
    """
    found: dict[str, tuple[str, int, int]] = {}
    paths: dict[str, str] = {}
    functions: dict[str, str] = {}
    for device in devices:
        check(device)
        if device.container_path in found:
            raise InvalidArgument(f"device {device.container_path!r}: given twice")
        if device.type.startswith("vfio-"):
            passed = await passthrough.find_functions(hotplug, device)
            functions.update(passed)
            if device.type == passthrough.GUEST_DRIVES:
                continue
            node = paths[device.container_path] = await passthrough.bind(children, device, passed)
            found[device.container_path] = numbers(node)
        else:
            # kata-agent finds PCI and SCSI disks by id, others by node. Without an id, a PCI disk may have a node.
            place = (device.type in ("blk", "scsi") and device.id) or device.vm_path
            found[device.container_path] = numbers(await find_block_device(hotplug, device.type, place))
    update_spec(spec, found)
    for entry in spec.Linux.Devices:
        # The group's number is part of its node's name, and differs in the guest.
        entry.Path = paths.get(entry.Path, entry.Path)
    return functions


def check(device: Device) -> None:
    if device.type not in DEVICE_TYPES:
        raise InvalidArgument(
            f"device {device.container_path!r}: unknown type {device.type!r}, known are {', '.join(DEVICE_TYPES)}"
        )
    if not device.container_path.startswith("/"):
        raise InvalidArgument(
            f"device {device.id or device.vm_path!r}: container path {device.container_path!r} is not absolute"
        )
    if not (device.id or device.vm_path or device.options):
        raise InvalidArgument(f"device {device.container_path!r}: neither id nor vm_path")


def numbers(node: str) -> tuple[str, int, int]:
    """(`b` or `c`, major, minor) of a device node."""
    try:
        found = os.stat(node)
    except OSError as error:
        raise NotFound(f"device node {node!r}: {os_cause(error)}") from error
    kind = "b" if stat.S_ISBLK(found.st_mode) else "c" if stat.S_ISCHR(found.st_mode) else ""
    if not kind:
        raise InvalidArgument(f"device node {node!r}: neither block nor character device")
    return kind, os.major(found.st_rdev), os.minor(found.st_rdev)


def update_spec(spec: Spec, found: dict[str, tuple[str, int, int]]) -> None:
    """The spec's devices at the paths of `found` have these numbers, as have the cgroup rules with the old ones."""
    missing = set(found) - {device.Path for device in spec.Linux.Devices}
    if missing:
        raise InvalidArgument(f"device {min(missing)!r}: not among the spec's devices")
    renumbered = {}
    for device in spec.Linux.Devices:
        if device.Path in found:
            kind, major, minor = found[device.Path]
            renumbered[(kind, device.Major, device.Minor)] = (major, minor)
            device.Type, device.Major, device.Minor = kind, major, minor
    for rule in spec.Linux.Resources.Devices:
        new = renumbered.get((rule.Type, rule.Major, rule.Minor))
        if new is not None:
            rule.Major, rule.Minor = new
