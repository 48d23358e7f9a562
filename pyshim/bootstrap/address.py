"""The shim's socket: which address a group of containers has, and who of several starters gets to serve it."""

import _socket
import errno
import fcntl
import posix
import sys

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
    path = f"{socket_dir.rstrip('/')}/{socket_name(containerd_address, namespace, group)}"
    if len(encoded(path)) > _MAX_PATH_BYTES:
        raise BootstrapError(f"make socket {path!r}: the path is longer than {_MAX_PATH_BYTES} bytes")
    return path


def socket_name(containerd_address: str, namespace: str, group: str) -> str:
    """The file name of `socket_path`: 64 hexadecimal digits."""
    return sha256_hex(encoded(cleaned("/".join((containerd_address, namespace, group)))))


def claim(path: str) -> "_socket.socket | None":
    """The listening socket at `path`, ours from now on; None when a live shim listens there already.

    Of any number of processes that claim the same path at the same time, one gets the socket and the others None: they
    take turns under a lock on the directory, and whoever finds the name in use connects to it. A socket that refuses
    was left by a dead shim and is replaced. A full backlog counts as alive.
    """
    directory = path.rpartition("/")[0]
    try:
        lock_fd = _open_directory(directory)
    except OSError as error:
        raise os_failure("open socket directory", directory, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return _bind_or_yield(path)
    except OSError as error:
        raise os_failure("bind socket", path, error) from error
    finally:
        posix.close(lock_fd)


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
    before = posix.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    finally:
        posix.umask(before)
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
        posix.unlink(path)
    except FileNotFoundError:
        return


def _open_directory(path: str) -> int:
    """A descriptor of the directory, which is made if need be."""
    flags = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC
    try:
        return posix.open(path, flags)
    except FileNotFoundError:
        from os import makedirs

        makedirs(path, mode=0o700, exist_ok=True)
        return posix.open(path, flags)


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


def absolute(path: str) -> str:
    """`os.path.abspath(path)`."""
    return cleaned(path if path.startswith("/") else f"{posix.getcwd()}/{path}")


def cleaned(path: str) -> str:
    """`os.path.normpath(path)`, for which `os` is imported only if there is anything to clean."""
    first, *words = path.split("/")
    if not first and not {"", ".", ".."}.intersection(words):
        return path
    from os.path import normpath

    return normpath(path)


def encoded(text: str) -> bytes:
    """`os.fsencode(text)`."""
    return text.encode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())


def decoded(data: bytes) -> str:
    """`os.fsdecode(data)`."""
    return data.decode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())


def is_there(path: str) -> bool:
    """Whether a file of any kind has this name."""
    try:
        posix.stat(path)
    except OSError:
        return False
    return True
