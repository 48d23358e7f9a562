"""The zygote: one process per node that has imported everything a shim needs and is forked for each new one.

It has no thread and no event loop, holds nothing of any pod, and serves only callers that live in its own world (user,
namespaces, rights). What it forks becomes what an exec by the caller would have made: session, control groups, limits,
environment, descriptors, command line. Whatever speaks against a fork is answered "no", and the caller executes.

An upgrade replaces it: it listens at an address made of version and place, and it ends as soon as a request finds its
own files changed. Forked daemons go on, they are nobody's children but the reaper's.
"""

import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from pyshim.bootstrap import zygote as link
from pyshim.bootstrap.daemonize import LISTENING_FD, become_daemon, join_cgroup, raise_oom_score
from pyshim.bootstrap.errors import BootstrapError
from pyshim.host.processes.caller import CallerDiffers, Cgroups, World, become_like, require_same_world, world_of
from pyshim.host.processes.command_line import set_command_line
from pyshim.host.processes.memory import give_back_free, keep_small_pages, offer_for_merging

STARTED_NS = time.time_ns()
_CLOCK_STEP_NS = 100_000_000
"""Files carry the kernel's coarse clock, which lags behind the fine one."""
_REQUEST_WITHIN_S = 5.0
"""A `start` that gives up hangs up, long before this."""
_GO_WITHIN_S = 10.0
_THREADS_GONE_WITHIN_S = 10.0
_FDS = 3
_RECEIVE_BYTES = 1 << 16
# What a shim uses: the last ones it imports itself only when it comes to it.
SHIM_MODULES = (
    "pyshim.serve",
    *("concurrent.futures.thread", "encodings.ascii", "google.protobuf.descriptor_pb2", "queue"),
    *(
        "pyshim.host.cgroups.removal",
        "pyshim.host.cgroups.sandbox_cgroups",
        "pyshim.host.network.link_removal",
        "pyshim.host.sources",
    ),
)


# In a fork: what is freed there would be written to, page by page.
_kept: list[object] = []


class Daemon(NamedTuple):
    """What a forked process was made for: the words after the program's, `serve` among them."""

    words: list[str]


class _Request(NamedTuple):
    program: list[str]
    words: list[str]
    shim_cgroup: str
    environment: dict[str, str]
    pid: int
    listening_fd: int
    cwd_fd: int
    log_fd: int


def run(*, directory: str, idle_s: float, modules: tuple[str, ...] | None = None) -> Daemon | None:
    """None in the zygote when it has ended: idle for `idle_s` (0: never), told to, or replaced by newer code.

    In every process that it forks this returns as well, with what that process shall do. A second zygote for the same
    address ends at once. Raises OSError when it cannot listen.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.stat(directory).st_uid != os.geteuid():
        raise PermissionError(f"listen in {directory!r}: it is another user's")
    path = link.address(directory)
    lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say("another zygote serves here already")
        return None
    gc.disable()
    for name in SHIM_MODULES if modules is None else modules:
        importlib.import_module(name)
    if modules is None:
        _rehearse(directory)
    zygote = _Zygote(path)
    gc.collect()
    gc.freeze()
    give_back_free()
    for advise in (keep_small_pages, offer_for_merging):
        with suppress(OSError):  # a kernel built without it: forks are right, only larger
            advise()
    return zygote.run(idle_s)


def _rehearse(directory: str) -> None:
    from pyshim.rehearsal import rehearse

    try:
        rehearse(directory)
    except Exception as error:  # forks are right without it, only larger
        _say(f"rehearsal failed: {type(error).__name__}: {error}")
    # A thread that was joined is the kernel's for a moment longer.
    until = time.monotonic() + _THREADS_GONE_WITHIN_S
    while len(os.listdir("/proc/self/task")) != 1:
        if time.monotonic() > until:
            raise OSError("rehearse: a thread is left, and a process with threads must not fork")
        time.sleep(0.001)


class _Zygote:
    def __init__(self, path: str) -> None:
        self._path = path
        self._world: World = world_of("self")
        self._cgroups = Cgroups()
        self._code = code_stamp()
        require_settled(self._code)
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        self._listener.bind(path)
        os.umask(before)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._stop = False

    def run(self, idle_s: float) -> Daemon | None:
        raise_oom_score()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        signal.set_wakeup_fd(self._waker.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wakened, select.POLLIN)
        _say("ready")
        while not self._stop:
            if not poll.poll(idle_s * 1000 if idle_s else None):
                break
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            daemon = self._serve(connection)
            if daemon is not None:
                return daemon
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        _say("ended")
        return None

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True

    def _serve(self, connection: socket.socket) -> Daemon | None:
        """The daemon in the forked child; None in the zygote, whatever the caller sent."""
        fds: list[int] = []
        with connection:
            try:
                request = self._checked_request(connection, fds)
                if os.fork() == 0:
                    # Closed with all that is not the daemon's own; nobody may close the numbers again later.
                    for sock in (self._listener, self._waker, self._wakened):
                        sock.detach()
                    fds.clear()
                    _kept.append(self)
                    _become(request, connection, self._cgroups)
                    return Daemon(words=request.words)
            except (OSError, ValueError, CallerDiffers) as error:
                _say(f"refused: {error}")
                with suppress(OSError):
                    connection.send(f"no: {error}\n".encode(errors="replace"))
            finally:
                for fd in fds:
                    with suppress(OSError):
                        os.close(fd)
        return None

    def _checked_request(self, connection: socket.socket, fds: list[int]) -> _Request:
        pid, uid, gid = peer_of(connection)
        if (uid, gid) != (os.geteuid(), os.getegid()):
            raise CallerDiffers(f"process {pid} is of user {uid}, group {gid}")
        require_same_world(self._world, pid)
        if self._code != code_stamp(tuple(self._code)):
            self._stop = True
            raise ValueError("the code on disk has changed")
        body = _receive(connection, fds)
        if len(fds) != _FDS:
            raise ValueError(f"{len(fds)} descriptors came, expected {_FDS}")
        program, words, shim_cgroup, environment = link.decode(body)
        if program[0] != sys.executable:
            raise ValueError(f"interpreter {program[0]!r} is not ours")
        return _Request(program, words, shim_cgroup, environment, pid, *fds)


def _become(request: _Request, connection: socket.socket, cgroups: Cgroups) -> None:
    """We are the daemon an exec by the caller would have made, and the caller has said that we may serve.

    Ends the process when anything fails or the caller has given up: it knows by the closed connection.
    """
    try:
        signal.set_wakeup_fd(-1)
        cgroups.join_those_of(request.pid)
        become_like(request.pid, request.environment)
        raise_oom_score(str(request.pid))
        os.fchdir(request.cwd_fd)
        # Kept above the daemon's table until the word has come.
        kept = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, LISTENING_FD + 1)
        become_daemon(request.listening_fd, request.log_fd, keep=frozenset({kept}))
        with socket.socket(fileno=kept) as caller:
            join_cgroup(request.shim_cgroup)
            with suppress(OSError):
                set_command_line([*request.program, *request.words])
            sys.argv[:] = [request.program[-1], *request.words]
            caller.settimeout(_GO_WITHIN_S)
            caller.sendall(link.READY)
            if caller.recv(len(link.GO)) != link.GO:
                os._exit(0)
        gc.enable()
    except (OSError, CallerDiffers, BootstrapError) as error:
        _say(f"fork for process {request.pid}: {error}")
        os._exit(1)
    except BaseException:
        os._exit(1)


def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    """A request's body; its descriptors are in `fds`, also when this raises ValueError or OSError."""
    deadline = time.monotonic() + _REQUEST_WITHIN_S
    data = b""
    size = 4
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk, received, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, _FDS)
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
    for fd in fds:
        os.set_inheritable(fd, False)
    return data[4:]


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, user and group of whoever connected. Source: unix(7), SO_PEERCRED."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def code_stamp(paths: tuple[str, ...] | None = None) -> dict[str, tuple[int, int, int]]:
    """When each file of ours that is loaded, and each directory that others are loaded from, last changed."""
    stamp = {}
    for path in paths or _loaded_paths():
        try:
            found = os.stat(path)
        except OSError:
            stamp[path] = (0, 0, 0)
            continue
        stamp[path] = (found.st_ctime_ns, found.st_ino, found.st_size)
    return stamp


def require_settled(stamp: dict[str, tuple[int, int, int]]) -> None:
    """No file of ours changed since this process began: what is loaded is what is there. Raises OSError."""
    for path, (moment, _, _) in stamp.items():
        if path.endswith(".py") and moment > STARTED_NS - _CLOCK_STEP_NS:
            raise OSError(f"use the loaded code: {path!r} changed while it was being loaded")


def _loaded_paths() -> tuple[str, ...]:
    ours, directories = set(), set()
    for name, module in tuple(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not os.path.isabs(path):
            continue
        if name.split(".")[0] in ("pyshim", "hypervisors", "protos"):
            ours.add(path)
        else:
            directories.add(os.path.dirname(path))
    return (*sorted(ours), *sorted(directories))


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"zygote: {text}\n".encode(errors="replace"))
