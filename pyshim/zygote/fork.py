"""A fork of the zygote: it waits for its caller, and becomes the daemon that an exec by that caller would have made.

It serves only a caller of its own world (user, namespaces, rights), and only once that has said so: a fork that comes
late finds that its caller has gone, and ends. Whatever speaks against it is answered "no", and the caller executes.
"""

import fcntl
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from array import array
from contextlib import suppress
from typing import NamedTuple

from pyshim.bootstrap import zygote as link
from pyshim.bootstrap.daemonize import LISTENING_FD, become_daemon, join_cgroup, raise_oom_score
from pyshim.bootstrap.errors import BootstrapError
from pyshim.host.memory.advice import make_own
from pyshim.host.memory.baseline import Baseline
from pyshim.host.processes.caller import (
    CallerDiffers,
    Cgroups,
    World,
    become_like,
    fresh_signals,
    require_same_world,
    set_environment,
)
from pyshim.host.processes.command_line import set_command_line
from pyshim.zygote.code import Stamp, is_current

QUIET_MS = 20
"""Nobody has come for so long: there is time for what is better done before the next caller than while it waits."""
TAKEN, STALE = b"taken\n", b"stale\n"
"""What a fork tells the zygote: that it has found its caller, and after that where, or that the files have changed."""
RECEIVE_BYTES = 1 << 16
_REQUEST_WITHIN_S = 5.0
"""A `start` that gives up hangs up, long before this."""
_GO_WITHIN_S = 10.0
_FDS = 3


# What is freed here would be written to, page by page.
_kept: list[object] = []


class Daemon(NamedTuple):
    """What a forked process was made for: the words after the program's, `serve` among them."""

    words: list[str]
    baseline: Baseline | None = None


class _Request(NamedTuple):
    program: list[str]
    words: list[str]
    shim_cgroup: str
    environment: dict[str, str]
    pid: int
    listening_fd: int
    cwd_fd: int
    log_fd: int


class CodeChanged(Exception):
    """What is loaded is not what is on disk."""


class Waiting:
    """This process, just forked. `zygote` leads to the zygote; `groups` are those its last caller was in.

    `likely` has start and end, in turn, of each run of pages that a pod will write to.
    """

    def __init__(
        self,
        *,
        listener: socket.socket,
        zygote: socket.socket,
        world: World,
        code: Stamp,
        cgroups: Cgroups,
        groups: str,
        likely: "array[int]",
    ) -> None:
        self._listener = listener
        self._zygote = zygote
        self._world = world
        self._code = code
        self._cgroups = cgroups
        self._last_groups = groups
        self._likely = likely

    def wait(self) -> Daemon:
        """The daemon that somebody has asked for, which we are. The process ends with the zygote, or if it fails."""
        try:
            signal.set_wakeup_fd(-1)
            fresh_signals()
            _kept.append(self)
            poll = select.poll()
            for sock in (self._zygote, self._listener):
                poll.register(sock, select.POLLIN)
            if not poll.poll(QUIET_MS):
                self._get_ready()
            while True:
                if self._zygote.fileno() in [fd for fd, _ in poll.poll()]:
                    os._exit(0)
                daemon = self._serve()
                if daemon is not None:
                    return daemon
        except BaseException as error:
            say(f"fork: {type(error).__name__}: {error}")
            os._exit(1)

    def _get_ready(self) -> None:
        """The next caller will wait for nothing that can be done before it is known.

        We are where the last one was. And we have asked ourselves: the memory that an answer writes to is our own. So
        is what Create and Start write to: each page would cost them 2 to 5 us.
        """
        with suppress(OSError):
            make_own(zip(self._likely[::2], self._likely[1::2], strict=True))
        with suppress(OSError, CallerDiffers):
            self._cgroups.join(self._last_groups)
        with suppress(OSError, ValueError, CallerDiffers, CodeChanged):
            asked, asking = socket.socketpair()
            with asked, asking:
                body = link.encode([sys.executable], [], "", dict(os.environ))
                socket.send_fds(asking, [body], [asking.fileno()] * _FDS)
                request = _request_of(self._checked_caller(asked), asked)
            for fd in (request.listening_fd, request.cwd_fd, request.log_fd):
                os.close(fd)
            become_like(request.pid)
            set_environment(request.environment)
            with open("/proc/self/cmdline") as file:
                set_command_line(file.read().split("\0")[:-1])

    def _serve(self) -> Daemon | None:
        """The daemon that the next caller has asked for, which we are; None for one that is not of our world."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        with connection:
            try:
                pid = self._checked_caller(connection)
                groups = self._cgroups.of(pid)
            except CodeChanged as error:
                _refuse(connection, error)
                self._tell(STALE)
                os._exit(0)
            except (OSError, CallerDiffers) as error:
                _refuse(connection, error)
                return None
            # From here on we are this caller's, whatever it asks for and when: others need another fork.
            self._tell(TAKEN + os.fsencode(groups))
            try:
                self._cgroups.join(groups)
                become_like(pid)
                request = _request_of(pid, connection)
                _become(request)
            except (OSError, ValueError, CallerDiffers, BootstrapError) as error:
                _refuse(connection, error)
                os._exit(0)
            # Closed with all that is not the daemon's own; nobody may close the numbers again later.
            for sock in (self._listener, self._zygote):
                sock.detach()
            _await_go(request, connection.detach())
        return Daemon(words=request.words)

    def _tell(self, word: bytes) -> None:
        with suppress(OSError):  # a zygote that has ended needs no word
            self._zygote.send(word)

    def _checked_caller(self, connection: socket.socket) -> int:
        """The pid of whoever connected, which lives in our world. Raises CallerDiffers, CodeChanged, OSError."""
        pid, uid, gid = peer_of(connection)
        if (uid, gid) != (os.geteuid(), os.getegid()):
            raise CallerDiffers(f"process {pid} is of user {uid}, group {gid}")
        require_same_world(self._world, pid)
        if not is_current(self._code):
            raise CodeChanged("the code on disk has changed")
        return pid


def _request_of(pid: int, connection: socket.socket) -> _Request:
    """What the process `pid` asks for; the descriptors that came are ours. Raises OSError, ValueError."""
    body, fds = _receive(connection)
    program, words, shim_cgroup, environment = link.decode(body)
    if program[0] != sys.executable:
        raise ValueError(f"interpreter {program[0]!r} is not ours")
    listening_fd, cwd_fd, log_fd = fds
    return _Request(program, words, shim_cgroup, environment, pid, listening_fd, cwd_fd, log_fd)


def _become(request: _Request) -> None:
    """What `become_like` did not do has been done, but for our descriptors. Raises OSError, BootstrapError."""
    set_environment(request.environment)
    raise_oom_score(str(request.pid))
    os.fchdir(request.cwd_fd)
    join_cgroup(request.shim_cgroup)
    with suppress(OSError):
        set_command_line([*request.program, *request.words])
    sys.argv[:] = [request.program[-1], *request.words]


def _await_go(request: _Request, caller_fd: int) -> None:
    """We are the daemon an exec by the caller would have made, and the caller has said that we may serve.

    Ends the process when anything fails or the caller has given up: it knows by the closed connection.
    """
    # Kept above the daemon's table until the word has come.
    kept = fcntl.fcntl(caller_fd, fcntl.F_DUPFD_CLOEXEC, LISTENING_FD + 1)
    become_daemon(request.listening_fd, request.log_fd, keep=frozenset({kept}))
    with socket.socket(fileno=kept) as caller:
        caller.settimeout(_GO_WITHIN_S)
        caller.sendall(link.READY)
        if caller.recv(len(link.GO)) != link.GO:
            os._exit(0)
    gc.enable()


def _refuse(connection: socket.socket, error: Exception) -> None:
    say(f"refused: {error}")
    with suppress(OSError):
        connection.send(f"no: {error}\n".encode(errors="replace"))


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A request's body and its descriptors. Raises ValueError, OSError, and then the descriptors may be left open."""
    deadline = time.monotonic() + _REQUEST_WITHIN_S
    fds: list[int] = []
    data = b""
    size = 4
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk, received, _, _ = socket.recv_fds(connection, RECEIVE_BYTES, _FDS)
        fds += received
        if not chunk:
            raise ValueError("the request is cut")
        data += chunk
        if len(data) >= 4:
            size = 4 + link.size_of(data[:4])
        if size > link.MAX_REQUEST_BYTES:
            raise ValueError(f"the request has {size} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the request did not come in time")
    if len(fds) != _FDS:
        raise ValueError(f"{len(fds)} descriptors came, expected {_FDS}")
    for fd in fds:
        os.set_inheritable(fd, False)
    return data[4:], fds


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, user and group of whoever connected. Source: unix(7), SO_PEERCRED."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def say(text: str) -> None:
    """The zygote's log, its standard error, has this line."""
    with suppress(OSError):
        os.write(2, f"zygote: {text}\n".encode(errors="replace"))
