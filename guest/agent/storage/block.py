"""Finds block devices by the place where the host plugged them in.

- blk: a PCI path, two-digit slots from the root separated by `/` (`02/01`: slot 1 behind the bridge in slot 2); a
  function may follow a dot; three or more parts whose first is 20 or more begin with a root complex. Or a node,
  `/dev/vdb`.
- mmioblk, nvdimm: a node. scsi: `SCSI-ID:LUN` on the first host.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress

from guest.agent.children import Children
from guest.agent.errors import Internal, InvalidArgument
from guest.agent.files import names_in, read_text, write_text
from guest.agent.storage.hotplug import Hotplug

SYS = "/sys"
# A bus has 32 slots, so a greater number is a root complex.
_SLOT = re.compile(r"([01]?[0-9a-f])(?:\.([0-7]))?")
_SCSI_ADDRESS = re.compile(r"[0-9]+:[0-9]+")
_ROOT_COMPLEX = re.compile(r"[2-9a-f][0-9a-f]")
_MKFS_TIMEOUT_S = 120.0


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
