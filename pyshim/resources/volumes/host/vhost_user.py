"""The store of vhost-user disks, laid out as Kata and SPDK's users have it. Blocking.

`<store>/block/devices/NAME` is a device node of VHOST_USER_BLK's major number, which no driver of the host answers; its
number is how a spec names the disk. `<store>/block/sockets/NAME` is where the program listens that serves it.
"""

import os
import stat

from pyshim.host.os_errors import os_errors
from pyshim.model.errors import FailedPrecondition, NotFound, Unimplemented

VHOST_USER_BLK, VHOST_USER_SCSI = 241, 242
"""Major numbers, of those the kernel's list leaves to local use; Kata's convention."""


def is_vhost_user(major: int) -> bool:
    return major in (VHOST_USER_BLK, VHOST_USER_SCSI)


def backend_socket(store: str, major: int, minor: int) -> str:
    """The socket of the disk whose node in the store has this number, with no link in its last part.

    Raises Unimplemented for a SCSI target, NotFound when no node has the number, FailedPrecondition when two have it or
    its socket is missing or of another type.
    """
    what = f"find vhost-user disk {major}:{minor} in '{store}'"
    if major == VHOST_USER_SCSI:
        raise Unimplemented(f"{what}: a SCSI target cannot be plugged, a disk ({VHOST_USER_BLK}:N) can")
    folder = f"{store}/block/devices"
    with os_errors(f"{what}: '{folder}'", NotFound), os.scandir(folder) as found:
        names = sorted(entry.name for entry in found if _has_number(entry, major, minor))
    if not names:
        raise NotFound(f"{what}: '{folder}' has no such node")
    if len(names) > 1:
        raise FailedPrecondition(f"{what}: {', '.join(map(repr, names))} all have this number")
    path = f"{store}/block/sockets/{names[0]}"
    with os_errors(f"{what}: '{path}'"):
        mode = os.lstat(path).st_mode
    if not stat.S_ISSOCK(mode):
        raise FailedPrecondition(f"{what}: '{path}' is not a socket")
    return path


def _has_number(entry: "os.DirEntry[str]", major: int, minor: int) -> bool:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # taken out while we look
        return False
    return stat.S_ISBLK(found.st_mode) and found.st_rdev == os.makedev(major, minor)
