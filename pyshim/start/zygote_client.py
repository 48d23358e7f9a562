"""The node's zygote as a client sees it: its address, and how `start` gets a daemon from it instead of by an exec.

One exchange over a Unix socket that keeps messages apart. `start` connects and sends a request with two descriptors
(listening socket, working directory); the zygote looks whether its code is that on disk, and forks a child. The child
answers once it is the daemon in all but serving. Then `start` says "go", or it hangs up, and the child ends without
having served. So there is never a second daemon on one socket, however late the answer.

Where the zygote is absent, of other code, busy or broken, `start` executes a fresh interpreter instead, and
the first one leaves a zygote behind. PYSHIM_ZYGOTE=off in containerd's environment switches both off.
"""

import fcntl
import os
import sys
import time

import pyshim
from pyshim.start.invocation import CommandError, os_failure
from pyshim.start.stdlib import sha256_digits, socket

PROTOCOL = "4"
ANSWER_WITHIN_S = 2.0
"""Seconds for the whole exchange. On a node so busy that this is too short, an exec takes as long."""
IDLE_S = 600
"""Seconds without a request after which a zygote that `start` launched ends."""
READY = b"ready\n"
GO = b"go\n"
NO = b"no: "
"""The zygote refuses; the reason follows."""
MAX_REQUEST_BYTES = 1 << 20
"""More than the kernel lets through in one message (net.core.wmem_default, mostly 208 KiB)."""
MAX_REPLY_BYTES = 1024


class Forked:
    """A daemon that the zygote forked; it is ready and waits for "go"."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def release(self) -> None:
        """It serves. Raises CommandError when it has died meanwhile."""
        try:
            self._connection.send(GO)
        except OSError as error:
            raise CommandError("start daemon: it ended before it began to serve") from error
        finally:
            self._connection.close()

    def end(self) -> None:
        """It ends without serving."""
        self._connection.close()


class NotForked(Exception):
    """The zygote makes no daemon for this call; `str(error)` is the reason, for the log of the executed daemon."""


class NoZygote(NotForked):
    """No zygote listens at the address."""


def fork_daemon(
    directory: str,
    program: list[str],
    words: list[str],
    *,
    environment: dict[str, str],
    listening_fd: int,
    log_path: str,
    shim_cgroup: str,
) -> Forked:
    """A daemon as `program` with `words` would make it, from the zygote in `directory`. Raises NotForked."""
    _require_wanted(environment)
    path, within_s = address(directory), _patience_s(environment)
    deadline = time.monotonic() + within_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    cwd_fd = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        connection.settimeout(within_s)
        _connect(connection, path)
        _send(connection, encode(program, words, shim_cgroup, log_path, environment), (listening_fd, cwd_fd))
        _require_ready(connection, deadline)
    except TimeoutError as error:
        connection.close()
        raise NotForked(f"the zygote did not answer within {within_s:g} s") from error
    except OSError as error:
        connection.close()
        raise NotForked(str(os_failure("ask zygote", path, error))) from error
    except NotForked:
        connection.close()
        raise
    finally:
        os.close(cwd_fd)
    return Forked(connection)


def launch(program: list[str], environment: dict[str, str], directory: str) -> None:
    """A zygote is on its way up, unless one is already; it outlives us and has nothing of ours open."""
    if _is_coming(address(directory)):
        return
    null_fds = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    command = [*program, "-idle", str(IDLE_S), "-directory", directory, "zygote"]
    try:
        os.posix_spawn(command[0], command, environment, file_actions=null_fds, setsid=True)
    except OSError:
        return  # the daemon that was asked for runs; the next `start` tries again


def address(directory: str) -> str:
    """The socket of the zygote that runs exactly our interpreter and our version from our place."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(pyshim.__file__)))
    facts = (PROTOCOL, pyshim.__version__, home, sys.executable, sys.version, str(os.geteuid()))
    return f"{directory}/zygote-{sha256_digits(chr(0).join(facts).encode())[:16]}"


def _require_wanted(environment: dict[str, str]) -> None:
    if environment.get("PYSHIM_ZYGOTE") == "off":
        raise NotForked("PYSHIM_ZYGOTE is off")
    if environment.get("SCHED_CORE"):
        # The kernel gives a core of its own to a process that asks before it forks, as `daemonize.spawn` does.
        raise NotForked("SCHED_CORE is set")


def _connect(connection: socket.socket, path: str) -> None:
    """The zygote at `path` forks a child for us. Raises NotForked, OSError."""
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NoZygote(f"no zygote listens at {path!r}") from error
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(credentials[4:8], sys.byteorder)
    if uid != os.geteuid():
        raise NotForked(f"the zygote at {path!r} is of user {uid}")


def _send(connection: socket.socket, request: bytes, fds: tuple[int, ...]) -> None:
    array = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    try:
        connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array)])
    except BrokenPipeError:
        return  # the zygote has refused already; its reason can still be read


def _receive(connection: socket.socket) -> bytes:
    """The zygote's answer; empty when it closed the connection without one."""
    try:
        return connection.recv(MAX_REPLY_BYTES)
    except ConnectionResetError:
        # The zygote refused before it read our request: the kernel reports that first, then the reason can be read.
        return connection.recv(MAX_REPLY_BYTES)


def _require_ready(connection: socket.socket, deadline: float) -> None:
    """The child is ready. Raises NotForked, OSError."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    reply = _receive(connection)
    if reply.startswith(NO):
        raise NotForked(f"the zygote refuses: {reply.removeprefix(NO).decode(errors='replace')}")
    if reply != READY:
        raise NotForked("the zygote hung up")


def _patience_s(environment: dict[str, str]) -> float:
    """PYSHIM_ZYGOTE_WITHIN_S if that is a positive number, else the usual limit."""
    try:
        within_s = float(environment.get("PYSHIM_ZYGOTE_WITHIN_S", ""))
    except ValueError:
        return ANSWER_WITHIN_S
    return within_s if 0 < within_s < 3600 else ANSWER_WITHIN_S


def _is_coming(path: str) -> bool:
    """True when a zygote holds the lock of `path`: it has the socket already, or is still importing."""
    try:
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock_fd)
    return False


def encode(program: list[str], words: list[str], shim_cgroup: str, log_path: str, environment: dict[str, str]) -> bytes:
    """The request: strings with NUL between them, which no string contains."""
    strings = [str(len(program)), str(len(words)), shim_cgroup, log_path, *program, *words]
    strings += [f"{key}={value}" for key, value in environment.items()]
    return os.fsencode("\0".join(strings))


def decode(request: bytes) -> tuple[list[str], list[str], str, str, dict[str, str]]:
    """Program, words, cgroup, log and environment of a request; raises ValueError for anything else."""
    programs, count, shim_cgroup, log_path, *strings = os.fsdecode(request).split("\0")
    first, last = int(programs), int(programs) + int(count)
    if not 0 < first <= last <= len(strings):
        raise ValueError("its counts are wrong")
    pairs = [text.partition("=") for text in strings[last:]]
    return strings[:first], strings[first:last], shim_cgroup, log_path, {key: value for key, _, value in pairs}
