"""Devices that the kernel's device mapper makes over a disk.

Source of the interface: the kernel's uapi/linux/dm-ioctl.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from fcntl import ioctl
from typing import NamedTuple

from guest.agent.children import Children
from guest.agent.errors import Internal, os_cause
from guest.agent.files import opened

SECTOR_BYTES = 512
_CONTROL = "/dev/mapper/control"
_VERSION = (4, 0, 0)
_HEADER = struct.Struct("=3IIIIiIIIQ128s129s7x")
"""struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name and
uuid."""
_TARGET = struct.Struct("=QQiI16s")
"""struct dm_target_spec: first sector, sectors, status, offset of the next, type."""
_CREATE, _REMOVE, _RESUME, _LOAD = 3, 4, 6, 9
_READ_ONLY, _DEFERRED = 1, 1 << 17
"""DM_READONLY_FLAG; DM_DEFERRED_REMOVE: a device in use goes with its last user."""


class Target(NamedTuple):
    """The one mapping of all `sectors` of a device."""

    type: str
    sectors: int
    parameters: str
    is_read_only: bool = False


async def map_device(children: Children, name: str, target: Target, modules: Sequence[str]) -> str:
    """The node of the new device `name`, once `modules` are loaded. Raises Internal with the reason."""
    await children.load_modules(*modules)
    try:
        return _map(name, target)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Internal(f"make device {name!r} of type {target.type!r}: {os_cause(error)}{where}") from error


def unmap_device(name: str) -> None:
    """The device is gone, or goes when the file system on it does. Raises OSError."""
    with opened(_CONTROL, os.O_RDWR) as control:
        _ask(control, _REMOVE, name, _DEFERRED)


def _map(name: str, target: Target) -> str:
    flags = _READ_ONLY if target.is_read_only else 0
    with opened(_CONTROL, os.O_RDWR) as control:
        device = _ask(control, _CREATE, name)
        try:
            _ask(control, _LOAD, name, flags, table(target))
            _ask(control, _RESUME, name, flags)
        except OSError:
            _ask(control, _REMOVE, name)
            raise
    return f"/dev/dm-{(device & 0xFF) | (device >> 12 & 0xFFF00)}"


def sectors_of(disk: str) -> int:
    with opened(disk, os.O_RDONLY) as fd:
        return os.lseek(fd, 0, os.SEEK_END) // SECTOR_BYTES


def table(target: Target) -> bytes:
    """The one target, as DM_TABLE_LOAD takes it."""
    text = target.parameters.encode() + b"\0"
    text += bytes(-len(text) % 8)
    return _TARGET.pack(0, target.sectors, 0, _TARGET.size + len(text), target.type.encode()) + text


def _ask(control: int, command: int, name: str, flags: int = 0, data: bytes = b"") -> int:
    """One ioctl about the device `name`; its device number."""
    size = _HEADER.size + len(data)
    head = _HEADER.pack(*_VERSION, size, _HEADER.size, 1 if data else 0, 0, flags, 0, 0, 0, name.encode(), b"")
    buffer = bytearray(head + data)
    ioctl(control, 3 << 30 | _HEADER.size << 16 | 0xFD << 8 | command, buffer)
    return int(_HEADER.unpack_from(buffer)[10])
