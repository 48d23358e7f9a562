"""Finds devices in the guest by the place where the host plugged them in, and writes their numbers into a spec.

- blk: a PCI path, two-digit slots from the root separated by `/` (`02/01`: slot 1 behind the bridge in slot 2); a
  function may follow a dot; three or more parts whose first is 20 or more begin with a root complex. Or a node,
  `/dev/vdb`.
- mmioblk, nvdimm: a node. scsi: `SCSI-ID:LUN` on the first host.
- vfio-pci-gk: the guest's kernel drives the PCI function; the container gets devices of the driver, by CDI.
- vfio-pci: the container drives it itself; the function is bound to the guest's vfio-pci and the container has the node
  of its IOMMU group. Options of both are `<host address>=<guest PCI path>`.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from protos.agent.agent_pb2 import Device
from protos.agent.oci_pb2 import Mount, Spec

from guest.agent.children import Children
from guest.agent.errors import FailedPrecondition, Internal, InvalidArgument, NotFound, os_cause
from guest.agent.files import names_in, read_text, write_text
from guest.agent.storage.hotplug import Hotplug

log = logging.getLogger(__name__)

SYS = "/sys"
# A bus has 32 slots, so a greater number is a root complex.
_SLOT = re.compile(r"([01]?[0-9a-f])(?:\.([0-7]))?")
_SCSI_ADDRESS = re.compile(r"[0-9]+:[0-9]+")
_ROOT_COMPLEX = re.compile(r"[2-9a-f][0-9a-f]")
_MKFS_TIMEOUT_S = 120.0


# -- disks -------------------------------------------------------------------------------------------------------------


async def find_block_device(hotplug: Hotplug, driver: str, source: str) -> str:
    """The device node (`/dev/...`) of what `source` names, once it is there."""
    if source.startswith("/dev/"):
        return await hotplug.wait_for(f"block device {source!r}", lambda: source if is_block(source) else None)
    if driver == "blk":
        pci_slots(source)  # refuse nonsense before waiting for it
        return await hotplug.wait_for(f"disk at PCI path {source!r}", lambda: pci_disk(SYS, source))
    if driver == "scsi":
        if not _SCSI_ADDRESS.fullmatch(source):
            raise InvalidArgument(f"SCSI address {source[:80]!r}: want ID:LUN")
        return await hotplug.wait_for(f"disk at SCSI address {source!r}", lambda: scanned_scsi_disk(SYS, source))
    raise InvalidArgument(f"{driver} device {source!r}: want a path below /dev")


def is_block(path: str) -> bool:
    """The node exists and its disk can be opened, which is possible a moment after the node appears."""
    try:
        if not stat.S_ISBLK(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        # Any other error is reported by the call that uses the device.
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)
    return True


def pci_slots(path: str) -> tuple[str, list[str]]:
    """(root complex, [`slot.function`, ...]) of a PCI path, as sysfs writes them. InvalidArgument for anything else."""
    parts = path.lower().split("/")
    root = parts.pop(0) if len(parts) >= 3 and _ROOT_COMPLEX.fullmatch(parts[0]) else "00"
    slots = []
    for part in parts:
        found = _SLOT.fullmatch(part)
        if found is None:
            raise InvalidArgument(f"PCI path {path[:80]!r}: want slots of two hexadecimal digits, separated by '/'")
        slots.append(f"{found[1]:0>2}.{found[2] or 0}")
    return root, slots


def pci_folder(sys: str, path: str) -> str | None:
    """The sysfs folder of the function at the PCI path; None if it is not there yet.

    Each bridge on the way is a folder that holds its secondary bus's functions.
    """
    root, slots = pci_slots(path)
    folder, bus = f"{sys}/devices/pci0000:{root}", root
    if not os.path.isdir(folder):  # without ACPI the root complex is a device of the device tree
        folder = next(iter(glob.glob(f"{sys}/devices/platform/*.pcie/pci0000:{root}")), folder)
    for index, slot in enumerate(slots):
        folder = f"{folder}/0000:{bus}:{slot}"
        if not os.path.isdir(folder):
            return None
        if index + 1 < len(slots):
            try:
                buses = [name[5:] for name in os.listdir(f"{folder}/pci_bus")]
            except OSError:
                return None
            if len(buses) != 1:
                return None
            bus = buses[0]
    return folder


def pci_disk(sys: str, path: str) -> str | None:
    """The node of the virtio disk at the PCI path; None if disk or node is not there yet."""
    folder = pci_folder(sys, path)
    if folder is None:
        return None
    for name in names_in(folder):
        if name.startswith("virtio") and (disks := names_in(f"{folder}/{name}/block")):
            return _node(disks[0])
    return None


def _node(disk: str) -> str | None:
    return f"/dev/{disk}" if is_block(f"/dev/{disk}") else None


def scanned_scsi_disk(sys: str, address: str) -> str | None:
    """As `scsi_disk`, after every SCSI host has looked for the address if the disk was not there.

    The shim's kernel command line has `scsi_mod.scan=none`, so no host looks by itself. The controller may be plugged
    together with the disk, and appear only during the wait.
    """
    found = scsi_disk(sys, address)
    if found is None:
        scsi_id, _, lun = address.partition(":")
        for host in names_in(f"{sys}/class/scsi_host"):
            with suppress(FileNotFoundError):  # a host that appears at this moment gets its attributes later
                write_text(f"{sys}/class/scsi_host/{host}/scan", f"0 {scsi_id} {lun}")
        found = scsi_disk(sys, address)
    return found


def scsi_disk(sys: str, address: str) -> str | None:
    """The node of the disk at ID:LUN on channel 0 of any host."""
    suffix = f":0:{address}"
    for name in names_in(f"{sys}/class/scsi_device"):
        disks = names_in(f"{sys}/class/scsi_device/{name}/device/block")
        if name.endswith(suffix) and name.count(":") == 3 and disks:
            return _node(disks[0])
    return None


async def make_filesystem(children: Children, node: str, fstype: str) -> None:
    """The whole device is a new ext4 without a journal: its volume ends with the sandbox."""
    if fstype != "ext4":
        raise InvalidArgument(f"make file system on {node!r}: {fstype!r} is not supported, 'ext4' is")
    words = ("-q", "-F", "-O", "^has_journal", "-m", "0", "-i", "163840", "-I", "128", node)
    await children.call("mkfs.ext4", *words, doing=f"make file system on {node!r}", timeout_s=_MKFS_TIMEOUT_S)


def disk_of(node: str) -> str:
    """The sysfs folder of a node's disk; Internal if the node is not a disk's."""
    number = os.stat(node).st_rdev
    folder = f"{SYS}/dev/block/{os.major(number)}:{os.minor(number)}"
    if not os.path.isdir(folder):
        raise Internal(f"find disk {node!r}: not in {SYS}/dev/block")
    return folder


def rescan(folder: str) -> None:
    """A SCSI disk's driver has read the size again. Other drivers do so by themselves."""
    with suppress(OSError):  # virtio disks have no such file
        write_text(f"{folder}/device/rescan", "1")


def disk_bytes(folder: str) -> int:
    return int(read_text(f"{folder}/size")) * 512


# -- a container's devices ---------------------------------------------------------------------------------------------

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
        check_device(device)
        if device.container_path in found:
            raise InvalidArgument(f"device {device.container_path!r}: given twice")
        if device.type.startswith("vfio-"):
            passed = await find_functions(hotplug, device)
            functions.update(passed)
            if device.type == GUEST_DRIVES:
                continue
            node = paths[device.container_path] = await bind_to_vfio(children, device, passed)
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


def check_device(device: Device) -> None:
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


def nodes_of(mounts: Iterable[Mount]) -> Iterator[tuple[str, int, int]]:
    """The numbers of the guest's own device nodes that are bind mounted.

    Not those of a volume: a container may have made them.
    """
    for mount in mounts:
        if mount.source.startswith("/dev/"):
            with suppress(InvalidArgument, NotFound):  # a file or a directory; crun names a missing one
                yield numbers(mount.source)


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


# -- PCI functions passed through to the guest -------------------------------------------------------------------------

GUEST_DRIVES = "vfio-pci-gk"
_ENV_PREFIX, _ENV_INFO = "PCIDEVICE_", "_INFO"
_DRIVER = "vfio-pci"
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


def functions_of(device: Device) -> list[tuple[str, str]]:
    """(host address, guest PCI path) of each option. InvalidArgument names one that is neither."""
    found = []
    for option in device.options:
        host, equals, path = option.partition("=")
        if not equals:
            raise InvalidArgument(f"device {device.container_path!r}: option {option[:80]!r} is not ADDRESS=PATH")
        pci_slots(path)
        found.append((full_address(host), path))
    if not found:
        raise InvalidArgument(f"device {device.container_path!r}: no function is named in its options")
    return found


def full_address(text: str) -> str:
    """`text` with its domain. InvalidArgument for other text than a PCI address."""
    found = _ADDRESS.fullmatch(text.lower())
    if found is None:
        raise InvalidArgument(f"PCI address {text[:80]!r}: want DOMAIN:BUS:SLOT.FUNCTION in hexadecimal digits")
    return f"{found[1] or '0000'}:{found[2]}"


async def find_functions(hotplug: Hotplug, device: Device) -> dict[str, str]:
    """Host address -> guest address of every function of the device, all of which are there."""
    found = {}
    for host, path in functions_of(device):
        folder = await hotplug.wait_for(f"PCI function at path {path!r}", partial(pci_folder, SYS, path))
        found[host] = os.path.basename(folder)
    return found


async def bind_to_vfio(children: Children, device: Device, functions: dict[str, str]) -> str:
    """The node of the IOMMU group that the functions, now bound to vfio-pci, make up. FailedPrecondition otherwise."""
    if not os.path.isdir(f"{SYS}/bus/pci/drivers/{_DRIVER}"):
        await children.load_modules(_DRIVER)
    groups = {bind_function(SYS, address) for address in functions.values()}
    if len(groups) != 1:
        raise FailedPrecondition(
            f"device {device.container_path!r}: its functions are in IOMMU groups {sorted(groups)}"
        )
    return f"/dev/vfio/{groups.pop()}"


def bind_function(sys: str, address: str) -> str:
    """The IOMMU group of the function, which is bound to vfio-pci now."""
    folder = f"{sys}/bus/pci/devices/{address}"
    try:
        group = os.path.basename(os.readlink(f"{folder}/iommu_group"))
    except OSError:
        raise FailedPrecondition(
            f"bind {address} to {_DRIVER}: it is in no IOMMU group (hint: the guest needs an IOMMU)"
        ) from None
    try:
        has_driver = os.path.islink(f"{folder}/driver")
        if has_driver and os.path.basename(os.readlink(f"{folder}/driver")) == _DRIVER:
            return group
        write_text(f"{folder}/driver_override", _DRIVER)
        if has_driver:
            write_text(f"{folder}/driver/unbind", address)
        write_text(f"{sys}/bus/pci/drivers_probe", address)
    except OSError as error:
        raise FailedPrecondition(f"bind {address} to {_DRIVER}: {os_cause(error)}") from error
    return group


def rewrite_env(env: Iterable[str], addresses: Mapping[str, str]) -> list[str]:
    """`env` with the guest's addresses in PCIDEVICE_* variables, in which device plugins write the host's.

    InvalidArgument names a variable with an address that was not passed through. If none was, the variables stay as
    they are.
    """
    env = list(env)
    if not addresses:
        if any(text.startswith(_ENV_PREFIX) for text in env):
            log.warning("variables name devices of the host, and none was passed through")
        return env
    out = []
    for text in env:
        name, equals, value = text.partition("=")
        if equals and name.startswith(_ENV_PREFIX):
            if name.endswith(_ENV_INFO):
                for host, guest in addresses.items():
                    value = value.replace(host, guest)
            elif value:
                value = ",".join(_translated(name, part, addresses) for part in value.split(","))
        out.append(f"{name}{equals}{value}")
    return out


def _translated(name: str, part: str, addresses: Mapping[str, str]) -> str:
    guest = addresses.get(full_address(part.strip()))
    if guest is None:
        raise InvalidArgument(f"rewrite variable {name!r}: host address {part[:80]!r} was not passed through")
    return guest
