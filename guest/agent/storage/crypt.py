"""dm-crypt over a disk. The key is made here, given to the kernel and forgotten, so the data is lost with the VM and is
never readable outside it.

Source of the interface: the kernel's uapi/linux/dm-ioctl.h and admin-guide/device-mapper/dm-crypt.rst.
"""

from __future__ import annotations

import logging
import os
import struct
from fcntl import ioctl

from guest.agent.children import Children, find_program
from guest.agent.errors import Internal, os_cause

log = logging.getLogger(__name__)

_CONTROL = "/dev/mapper/control"
_MODULES = ("dm_mod", "dm_crypt", "ecb", "xts")
_LOAD_TIMEOUT_S = 30.0
_VERSION = (4, 0, 0)
_HEADER = struct.Struct("=3IIIIiIIIQ128s129s7x")
"""struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name and
uuid."""
_TARGET = struct.Struct("=QQiI16s")
"""struct dm_target_spec: first sector, sectors, status, offset of the next, type."""
_CREATE, _REMOVE, _RESUME, _LOAD = 3, 4, 6, 9
_KEY_BYTES = 64
"""AES-256 in XTS mode has two keys."""
_SECTOR_BYTES = 512


async def encrypted(children: Children, disk: str) -> str:
    """The node of a device that encrypts all writes to `disk` with a new key. Internal says why there is none."""
    program = find_program("modprobe")
    if program is not None:
        for module in _MODULES:  # a module that is built in cannot be loaded, and need not be
            ended = await children.run([program, module], timeout_s=_LOAD_TIMEOUT_S)
            if ended.code:
                log.info("module not loaded", extra={"kernel_module": module, "error": ended.complaint})
    try:
        return map_device(f"crypt-{os.path.basename(disk)}", disk)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise Internal(f"encrypt {disk!r}: {os_cause(error)}{where}") from error


def map_device(name: str, disk: str) -> str:
    """As `encrypted`. An OSError leaves nothing of the device."""
    sectors = _sectors(disk)
    table = crypt_table(sectors, disk, os.urandom(_KEY_BYTES))
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        device = _ask(control, _CREATE, name)
        try:
            _ask(control, _LOAD, name, table)
            _ask(control, _RESUME, name)
        except OSError:
            _ask(control, _REMOVE, name)
            raise
    finally:
        os.close(control)
    return f"/dev/dm-{(device & 0xFF) | (device >> 12 & 0xFFF00)}"


def _sectors(disk: str) -> int:
    fd = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END) // _SECTOR_BYTES
    finally:
        os.close(fd)


def crypt_table(sectors: int, disk: str, key: bytes) -> bytes:
    """The device's one target, as DM_TABLE_LOAD takes it."""
    text = f"aes-xts-plain64 {key.hex()} 0 {disk} 0".encode() + b"\0"
    text += bytes(-len(text) % 8)
    return _TARGET.pack(0, sectors, 0, _TARGET.size + len(text), b"crypt") + text


def _ask(control: int, command: int, name: str, data: bytes = b"") -> int:
    """One ioctl about the device `name`; its device number."""
    size = _HEADER.size + len(data)
    head = _HEADER.pack(*_VERSION, size, _HEADER.size, 1 if data else 0, 0, 0, 0, 0, 0, name.encode(), b"")
    buffer = bytearray(head + data)
    ioctl(control, 3 << 30 | _HEADER.size << 16 | 0xFD << 8 | command, buffer)
    return int(_HEADER.unpack_from(buffer)[10])
