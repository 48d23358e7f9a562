"""The node's zygote as `start` sees it: where it listens, and how a daemon is had from it instead of by an exec.

One exchange over a Unix stream socket. `start` connects as soon as it knows that a daemon is wanted, and is examined
meanwhile. It sends a request with three descriptors (listening socket, working directory, log); the forked daemon makes
itself ready and says so; `start` says "go", or hangs up, and then that daemon ends without having served anybody. So
there is never a second daemon on one socket, however late the zygote answers.

A zygote that is absent, of other code, busy or broken is no error: `start` executes a fresh interpreter instead.
PYSHIM_ZYGOTE in containerd's environment chooses: `off`; `auto`, which also starts a zygote where none is; without it
a zygote that is there is used.
"""

import _socket
import posix
import sys
import time

import pyshim
from pyshim.bootstrap.address import absolute, decoded, encoded, sha256_hex
from pyshim.bootstrap.errors import BootstrapError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOL = "1"
ANSWER_WITHIN_S = 0.05
"""How long `start` waits for all of it; an exec takes about as long as a zygote that is this slow."""
IDLE_S = 600
"""A zygote that `start` started ends itself when nobody has asked it for this long."""
READY = b"ready\n"
GO = b"go\n"
MAX_REQUEST_BYTES = 4 << 20
_SIZE_BYTES = 4
_MAX_REPLY_BYTES = 1024
_SOL_SOCKET, _SCM_RIGHTS, _SO_PEERCRED = _socket.SOL_SOCKET, _socket.SCM_RIGHTS, _socket.SO_PEERCRED


class Forked:
    """A daemon of the zygote's that is ready and waits for a word."""

    def __init__(self, connection: "_socket.socket") -> None:
        self._connection = connection

    def release(self) -> None:
        """It serves. Raises BootstrapError when it has died meanwhile."""
        try:
            self._connection.send(GO)
        except OSError as error:
            raise BootstrapError("start daemon: it ended before it began to serve") from error
        finally:
            self._connection.close()

    def end(self) -> None:
        """It ends, having served nobody."""
        self._connection.close()


def address(directory: str) -> str:
    """The socket of the zygote that runs exactly our interpreter and our version from our place."""
    home = absolute(pyshim.__file__).rsplit("/", 2)[0]
    facts = (PROTOCOL, pyshim.__version__, home, sys.executable, sys.version, str(posix.geteuid()))
    return f"{directory}/zygote-{sha256_hex(chr(0).join(facts).encode())[:16]}"


def connect(environment: "dict[str, str]", directory: str) -> "_socket.socket | None":
    """A connection to the zygote: a fork of it examines us from now on, and waits for the request.

    None when there is none, or it is another user's.
    """
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC, 0)
    try:
        connection.settimeout(_patience_s(environment))
        connection.connect(address(directory))
        if _peer_uid(connection) == posix.geteuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def fork_daemon(
    connection: "_socket.socket",
    program: "list[str]",
    words: "list[str]",
    *,
    environment: "dict[str, str]",
    listening_fd: int,
    log_fd: int,
    shim_cgroup: str,
) -> "Forked | None":
    """A daemon as `program` with `words` would make it, had from the zygote; None when that cannot be had in time.

    `connection`, from `connect`, is the daemon's, or closed.
    """
    deadline = time.monotonic() + _patience_s(environment)
    cwd_fd = -1
    try:
        cwd_fd = posix.open(".", posix.O_PATH | posix.O_CLOEXEC)
        request = encode(program, words, shim_cgroup, environment)
        sent = connection.sendmsg([request], [(_SOL_SOCKET, _SCM_RIGHTS, _fd_array((listening_fd, cwd_fd, log_fd)))])
        while sent < len(request):
            connection.settimeout(_left_s(deadline))
            sent += connection.send(request[sent:])
        connection.settimeout(_left_s(deadline))
        if connection.recv(_MAX_REPLY_BYTES) == READY:
            return Forked(connection)
    except OSError:
        pass
    finally:
        if cwd_fd >= 0:
            posix.close(cwd_fd)
    connection.close()
    return None


def _patience_s(environment: "dict[str, str]") -> float:
    """The limit, or what PYSHIM_ZYGOTE_WITHIN_S says where that is a positive number."""
    try:
        within_s = float(environment.get("PYSHIM_ZYGOTE_WITHIN_S", ""))
    except ValueError:
        return ANSWER_WITHIN_S
    return within_s if 0 < within_s < 3600 else ANSWER_WITHIN_S


def launch(program: "list[str]", environment: "dict[str, str]", directory: str) -> None:
    """A zygote is on its way up, unless one is already; it outlives us and has nothing of ours open."""
    if _is_coming(address(directory)):
        return
    null_fds = [(posix.POSIX_SPAWN_OPEN, fd, "/dev/null", posix.O_RDWR, 0) for fd in (0, 1, 2)]
    command = [*program, "-idle", str(IDLE_S), "-directory", directory, "zygote"]
    try:
        posix.posix_spawn(command[0], command, environment, file_actions=null_fds, setsid=True)
    except OSError:
        return  # the daemon that was asked for runs; the next `start` tries again


def _is_coming(path: str) -> bool:
    """Whether a zygote holds the lock of `path`: it has the socket already, or is still importing."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        lock_fd = posix.open(f"{path}.lock", posix.O_RDWR | posix.O_CLOEXEC)
    except OSError:
        return False
    try:
        flock(lock_fd, LOCK_EX | LOCK_NB)
    except OSError:
        return True
    finally:
        posix.close(lock_fd)
    return False


def encode(program: "list[str]", words: "list[str]", shim_cgroup: str, environment: "dict[str, str]") -> bytes:
    """The request: its size, then strings that end with NUL (none of them can hold one)."""
    strings = [str(len(program)), str(len(words)), shim_cgroup, *program, *words]
    strings += [f"{key}={value}" for key, value in environment.items()]
    body = encoded("\0".join(strings))
    return len(body).to_bytes(_SIZE_BYTES, "big") + body


def decode(body: bytes) -> "tuple[list[str], list[str], str, dict[str, str]]":
    """Program, words, cgroup and environment of a request without its size; raises ValueError for anything else."""
    programs, count, shim_cgroup, *strings = decoded(body).split("\0")
    first, last = int(programs), int(programs) + int(count)
    if not 0 < first <= last <= len(strings):
        raise ValueError("its counts are wrong")
    pairs = [text.partition("=") for text in strings[last:]]
    return strings[:first], strings[first:last], shim_cgroup, {key: value for key, _, value in pairs}


def size_of(head: bytes) -> int:
    """The size of the request whose first four bytes are `head`."""
    return int.from_bytes(head, "big")


def _fd_array(fds: "Iterable[int]") -> bytes:
    return b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _peer_uid(connection: "_socket.socket") -> int:
    credentials = connection.getsockopt(_SOL_SOCKET, _SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)
