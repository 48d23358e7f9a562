"""A pod's network namespace: opened once, checked, and locked by one sandbox at a time while it is being wired."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.host.syscalls import CLONE_NEWNET
from pyshim.model.errors import InvalidArgument, NotFound

_NS_GET_NSTYPE = 0xB703
"""ioctl_ns(2)."""


@contextmanager
def locked_netns(path: str) -> Iterator[int]:
    """An fd of the network namespace at `path`; locked against other sandboxes until the block is left.

    Raises NotFound when there is nothing at `path`, InvalidArgument for a file of another type and for the shim's own
    (a pod on the host's network cannot be moved into a VM), FailedPrecondition while another sandbox has locked it.
    """
    subject = f"open network namespace {path!r}"
    try:
        # Never block on a FIFO, never open a device.
        namespace = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{subject}: {describe_os_error(error)}") from error
    except (OSError, ValueError) as error:
        cause = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InvalidArgument(f"{subject}: {cause}") from error
    with namespace:
        _check(namespace.fileno(), subject)
        with os_errors(f"lock network namespace {path!r}", hint="another sandbox is using it"):
            # Two sandboxes in one namespace: the second must not look before the first has finished wiring.
            fcntl.flock(namespace.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield namespace.fileno()


def _check(fd: int, subject: str) -> None:
    try:
        kind = fcntl.ioctl(fd, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != CLONE_NEWNET:
        raise InvalidArgument(f"{subject}: not a network namespace")
    theirs, ours = os.fstat(fd), os.stat("/proc/self/ns/net")
    if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
        # Without the path: CRI-O pins the namespace under another name at each attempt, and equal events merge.
        raise InvalidArgument("enter network namespace: hostNetwork is true, and a VM cannot have the host's network")
