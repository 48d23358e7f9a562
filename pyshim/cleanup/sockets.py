"""Removes the sockets of dead shims. Not in address.py, to keep the imports of `start` few."""

import contextlib
import errno
import fcntl
import os
import socket
import stat

from pyshim.start.address import NOTES, forget


def noted_sockets(notes: str = NOTES) -> tuple[str, ...]:
    """The path of every socket that a `start` has noted, in the order of their names."""
    try:
        links = sorted(os.listdir(notes))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    paths = []
    for link in links:
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"{notes}/{link}"))
    return tuple(path for path in paths if os.path.isabs(path))


def remove_dead_socket(address: str, notes: str = NOTES, *, dry_run: bool = False) -> bool:
    """No socket is left at `unix://PATH` that refuses connections; one that is served, or being claimed, stays.

    Its note goes with it. True if there was such a socket, which `dry_run` leaves. Any other address is nothing of ours
    to remove.
    """
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        return False
    try:
        lock_fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The lock of address.claim: a socket that is bound but not yet listening refuses connections too.
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        probe.setblocking(False)
        probe.connect(path)
    except OSError as error:
        # A file that is not a socket refuses with the same error.
        if error.errno == errno.ECONNREFUSED:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    if not dry_run:
                        os.unlink(path)
                        forget(path, notes)
                    return True
        elif error.errno == errno.ENOENT and not dry_run:
            with contextlib.suppress(OSError):
                forget(path, notes)
    finally:
        probe.close()
        os.close(lock_fd)
    return False
