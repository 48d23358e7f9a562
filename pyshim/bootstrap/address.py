"""The shim's socket: which address a group of containers has, and who of several starters gets to serve it."""

import _socket
import errno
import fcntl
import os

from pyshim.bootstrap.errors import BootstrapError, os_failure

SOCKET_DIR = "/run/containerd/s"
_MAX_PATH_BYTES = 107
"""sun_path of Linux, less its NUL; containerd's socket_dir of 42 characters needs all of it."""
_BACKLOG = 128


def socket_path(socket_dir: str, containerd_address: str, namespace: str, group: str) -> str:
    """The socket of `group`'s shim: a hash of everything that makes the group unique on this node.

    The same arithmetic as containerd's own shims (sha256 of the cleaned joined path); containerd uses only what
    `start` prints.
    """
    path = os.path.join(socket_dir, socket_name(containerd_address, namespace, group))
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise BootstrapError(f"make socket {path!r}: the path is longer than {_MAX_PATH_BYTES} bytes")
    return path


def socket_name(containerd_address: str, namespace: str, group: str) -> str:
    """The file name of `socket_path`: 64 hexadecimal digits."""
    return sha256_hex(os.fsencode(os.path.normpath("/".join((containerd_address, namespace, group)))))


def claim(path: str) -> "_socket.socket | None":
    """The listening socket at `path`, ours from now on; None when a live shim listens there already.

    Of any number of processes that claim the same path at the same time, one gets the socket and the others None: they
    take turns under a lock on the directory, and whoever finds the name in use connects to it. A socket that refuses
    was left by a dead shim and is replaced. A full backlog counts as alive.
    """
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise os_failure("open socket directory", directory, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return _bind_or_yield(path)
    except OSError as error:
        raise os_failure("bind socket", path, error) from error
    finally:
        os.close(lock_fd)


def abandon(listener: "_socket.socket", path: str) -> None:
    """Nobody can find the socket any more, then it is closed: in this order, so that a successor's is never removed."""
    try:
        unlink(path)
    finally:
        listener.close()


def _bind_or_yield(path: str) -> "_socket.socket | None":
    listener = _new_socket()
    try:
        if not _bind(listener, path):
            if _somebody_listens(path):
                listener.close()
                return None
            unlink(path)
            if not _bind(listener, path):
                raise OSError(errno.EADDRINUSE, "in use")
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: "_socket.socket", path: str) -> bool:
    # By umask, not chmod: there is no moment in which others could connect.
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


def _somebody_listens(path: str) -> bool:
    """Whether a connect gets through; never waits, a Unix socket answers a non-blocking connect at once."""
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
    except FileNotFoundError:
        return


def _new_socket() -> "_socket.socket":
    # The C type behind socket.socket: the module around it would be the largest import of `start`.
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC, 0)


def sha256_hex(data: bytes) -> str:
    """The SHA-256 of `data`."""
    # The interpreter's own code first: hashlib loads OpenSSL (2 ms) for one short hash.
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]
    except ImportError:
        from hashlib import sha256
    return str(sha256(data).hexdigest())
