"""Removes the socket of a dead shim. Not in address.py, to keep the imports of `start` few."""

import contextlib
import errno
import fcntl
import os
import socket
import stat


def remove_dead_socket(address: str) -> None:
    """No socket is left at `unix://PATH` that refuses connections; one that is served, or being claimed, stays.

    Any other address is nothing of ours to remove.
    """
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        return
    try:
        lock_fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
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
                    os.unlink(path)
    finally:
        probe.close()
        os.close(lock_fd)
