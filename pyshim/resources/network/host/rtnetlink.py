"""Messages of rtnetlink and their attributes, as bytes, and the namespace to send them in.

Source: rtnetlink(7), netlink(7), linux/rtnetlink.h. Import-light like `link_removal` and `link_search`: for `delete`.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from pyshim.host import syscalls
from pyshim.host.threads import in_short_thread

T = TypeVar("T")

HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
IFINFO_BYTES = 16
"""Of a message about a link, before its attributes."""
IFLA_IFNAME = 3
RTM_DELLINK = 17


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and body of each message; what makes no sense ends them."""
    return _pieces(data, HEADER)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each attribute; what makes no sense ends them."""
    return _pieces(data, ATTRIBUTE)


def _pieces(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Both kinds begin with their length, header included, and what they are, and go on at a multiple of four."""
    offset = 0
    while offset + header.size <= len(data):
        length, kind = header.unpack_from(data, offset)[:2]
        if length < header.size:
            return
        yield kind, data[offset + header.size : offset + length]
        offset += (length + 3) & ~3


def in_netns(netns: str, inode: int, work: Callable[[], T]) -> T:
    """The result of `work` in that network namespace ("": this process's own). A socket made there stays there.

    Raises FileNotFoundError if the namespace, with this inode if one is given, is not at that path.
    """

    def run() -> T:
        if netns:
            _enter(netns, inode)
        return work()

    return in_short_thread(run)


def _enter(netns: str, inode: int) -> None:
    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if inode and os.fstat(fd).st_ino != inode:
            # The path leads to another namespace, perhaps to the host's own.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        syscalls.setns(fd, syscalls.CLONE_NEWNET)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # A plain file: the namespace that was bound here has been unmounted, and its links went with it.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns) from error
        raise
    finally:
        os.close(fd)
