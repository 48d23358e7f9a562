"""Removing a directory tree a guest may have written in."""

import contextlib
import errno
import os

from pyshim.host import syscalls

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_RESOLVE = syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_BENEATH


def remove_tree(path: str) -> None:
    """`path` and everything below it is gone; a path that does not exist is success.

    Never follows a symbolic link and never enters a mount point, bind mounts of the same file system included (openat2,
    RESOLVE_NO_XDEV): whatever still is mounted there belongs to somebody else. Raises OSError EBUSY naming that mount
    point. A `path` that is a link or a file is unlinked.
    """
    above, name = os.path.split(path.rstrip("/"))
    if not name:
        raise OSError(errno.EINVAL, "refused to remove the root directory", path)
    try:
        above_fd = os.open(above or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _remove_entry(above_fd, name, path)
    except RecursionError:
        # An error of this tree, like any other that keeps it: whoever undoes a list goes on with its other entries.
        raise OSError(errno.ENAMETOOLONG, "directories are nested too deeply", path) from None
    finally:
        os.close(above_fd)


def _remove_entry(above_fd: int, name: str, path: str) -> None:
    try:
        os.unlink(name, dir_fd=above_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise OSError(errno.EBUSY, "something is still mounted there", path) from None
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    else:
        return
    try:
        fd = syscalls.openat2(above_fd, name, _OPEN_FLAGS, resolve=_RESOLVE)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EBUSY, "something is still mounted there", path) from None
        raise
    try:
        for child in os.listdir(fd):
            _remove_entry(fd, child, f"{path}/{child}")
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=above_fd)
