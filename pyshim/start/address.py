"""The shim's socket: the address of a group of containers, and which of several simultaneous starts serves it."""

import errno
import fcntl
import os

from pyshim.start.invocation import CommandError, os_failure
from pyshim.start.stdlib import sha256_digits, socket

SOCKET_DIR = "/run/containerd/s"
NOTES = "/run/pyshim/sockets"
"""Has a link to each socket of ours, named alike. Other runtimes have theirs in the same directory: only the note of a
shim that ended before it had a sandbox says that its socket is ours."""
_MAX_PATH_BYTES = 107
"""sun_path of Linux, less its NUL; containerd's socket_dir of 42 characters needs all of it."""
_BACKLOG = 128


def socket_path(socket_dir: str, containerd_address: str, namespace: str, group: str) -> str:
    """The socket of `group`'s shim: a hash of everything that makes the group unique on this node.

    The same arithmetic as containerd's own shims (sha256 of the cleaned joined path); containerd uses only what
    `start` prints.
    """
    path = f"{socket_dir.rstrip('/')}/{socket_name(containerd_address, namespace, group)}"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise CommandError(f"make socket {path!r}: the path is longer than {_MAX_PATH_BYTES} bytes")
    return path


def socket_name(containerd_address: str, namespace: str, group: str) -> str:
    """The file name of `socket_path`: 64 hexadecimal digits."""
    where = os.path.normpath("/".join((containerd_address, namespace, group)))
    return sha256_digits(os.fsencode(where))


def claim(path: str, notes: str = "") -> socket.socket | None:
    """The listening socket at `path`, ours from now on; None when a live shim listens there already.

    With `notes`, a directory, it was noted there first. Raises CommandError; then a socket or note of ours is gone.

    Of any number of processes that claim the same path at the same time, one gets the socket and the others None: they
    take turns under a lock on the directory, and a process that finds the name in use connects to it. A socket that
    refuses was left by a dead shim and is replaced. A full backlog counts as alive.
    """
    directory = os.path.dirname(path)
    try:
        lock_fd = _open_directory(directory)
    except OSError as error:
        raise os_failure("open socket directory", directory, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        is_new = bool(notes) and _note(path, notes)
        try:
            return _bind_or_yield(path)
        except OSError:
            if is_new:  # another one is of a socket that is there
                forget(path, notes)
            raise
    except OSError as error:
        raise os_failure("bind socket", path, error) from error
    finally:
        os.close(lock_fd)


def _note(path: str, notes: str) -> bool:
    """The socket is noted; False if it was before."""
    link = f"{notes}/{os.path.basename(path)}"
    for _ in range(2):
        try:
            os.symlink(path, link)
            return True
        except FileNotFoundError:
            os.makedirs(notes, mode=0o700, exist_ok=True)
        except FileExistsError:
            if os.readlink(link) == path:
                return False
            unlink(link)
    raise OSError(errno.EEXIST, "in use", link)


def forget(path: str, notes: str = NOTES) -> None:
    """There is no note of the socket, which is gone."""
    unlink(f"{notes}/{os.path.basename(path)}")


def abandon(listener: socket.socket, path: str, notes: str = NOTES) -> None:
    """The name is removed, then the socket is closed: in the other order, a successor's name could be removed."""
    try:
        unlink(path)
        forget(path, notes)
    finally:
        listener.close()


def _bind_or_yield(path: str) -> socket.socket | None:
    listener = _new_socket()
    try:
        if not _bind(listener, path):
            if _takes_connections(path):
                listener.close()
                return None
            unlink(path)
            if not _bind(listener, path):
                raise OSError(errno.EADDRINUSE, "in use")
        try:
            listener.listen(_BACKLOG)
        except OSError:
            unlink(path)
            raise
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, path: str) -> bool:
    # By umask, not chmod: after bind and before chmod others could connect.
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    finally:
        os.umask(before)
    return True


def _takes_connections(path: str) -> bool:
    """True when a connect succeeds. Does not wait: a Unix socket answers a non-blocking connect at once."""
    probe = _new_socket()
    try:
        probe.setblocking(False)
        probe.connect(path)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            return False
        raise
    finally:
        probe.close()
    return True


def unlink(path: str) -> None:
    """No file has this name."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def _open_directory(path: str) -> int:
    """A descriptor of the directory, which is made if it is missing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return os.open(path, flags)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
