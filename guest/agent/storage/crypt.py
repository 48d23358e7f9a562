"""dm-crypt over a disk. The key is made here, given to the kernel and forgotten, so the data is lost with the VM and is
never readable outside it.

Source: the kernel's admin-guide/device-mapper/dm-crypt.rst.
"""

from __future__ import annotations

import os

from guest.agent.children import Children
from guest.agent.errors import Internal, os_cause
from guest.agent.storage.device_mapper import Target, map_device, sectors_of

_MODULES = ("dm_mod", "dm_crypt", "ecb", "xts")
_KEY_BYTES = 64
"""AES-256 in XTS mode has two keys."""


async def encrypted(children: Children, disk: str) -> str:
    """The node of a device that encrypts all writes to `disk` with a new key. Raises Internal with the reason."""
    try:
        target = crypt_target(sectors_of(disk), disk, os.urandom(_KEY_BYTES))
    except OSError as error:
        raise Internal(f"encrypt {disk!r}: {os_cause(error)}") from error
    return await map_device(children, f"crypt-{os.path.basename(disk)}", target, _MODULES)


def crypt_target(sectors: int, disk: str, key: bytes) -> Target:
    return Target(type="crypt", sectors=sectors, parameters=f"aes-xts-plain64 {key.hex()} 0 {disk} 0")
