"""Loop devices that vanish with their mount. Source: loop(4), linux/loop.h."""

import errno
import fcntl
import os
import struct

from pyshim.host.fds import OwnedFd

_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_ATTEMPTS = 32
"""Attempts to get a free loop device, which other processes take at the same time."""

# struct loop_config: fd, block_size, struct loop_info64 {5 u64, 4 u32, 64 + 64 + 32 bytes, 2 u64}, 8 reserved u64.
_LOOP_CONFIG = struct.Struct("=II5Q4I64s64s32s2Q64x")


def attach_loop(path: str, *, read_only: bool) -> tuple[str, OwnedFd]:
    """A loop device's path showing the file `path`, and the fd that keeps it until it is mounted.

    The device clears itself when its last user (the fd, then the mount) is gone. Raises OSError.
    """
    backing_flags = os.O_RDONLY if read_only else os.O_RDWR
    with (
        OwnedFd(os.open(path, backing_flags | os.O_CLOEXEC)) as backing,
        OwnedFd(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control,
    ):
        flags = _LO_FLAGS_AUTOCLEAR | (_LO_FLAGS_READ_ONLY if read_only else 0)
        name = os.fsencode(path)[:63]
        config = _LOOP_CONFIG.pack(backing.fileno(), 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
        for _ in range(_ATTEMPTS):
            device = f"/dev/loop{fcntl.ioctl(control.fileno(), _LOOP_CTL_GET_FREE)}"
            loop = OwnedFd(os.open(device, backing_flags | os.O_CLOEXEC))
            try:
                fcntl.ioctl(loop.fileno(), _LOOP_CONFIGURE, config)
            except OSError as error:
                loop.close()
                if error.errno != errno.EBUSY:
                    raise
                # Another process took the free one first; ask for another.
                continue
            return device, loop
    raise OSError(errno.EBUSY, f"no free loop device in {_ATTEMPTS} attempts", path)
