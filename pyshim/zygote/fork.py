"""A request of `start`, and the child of the zygote for it: the daemon that an exec by its caller would have made.

All of a request is checked before the fork, so the child has little to do. The child serves only once the caller has
said so: a child that comes late finds that its caller has gone, and ends.
"""

import gc
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from pyshim.host.processes.caller import (
    CallerDiffers,
    ProcessCgroups,
    World,
    become_like,
    require_same_world,
    set_environment,
)
from pyshim.host.processes.command_line import set_command_line
from pyshim.start import zygote_client
from pyshim.start.daemonize import above_table, become_daemon, join_cgroup, open_log, raise_oom_score
from pyshim.start.invocation import CommandError

WITHIN_S = 1.0
"""Seconds for a caller's request. `start` sends it as soon as it is connected."""
_FDS = 2


class Request(NamedTuple):
    """A daemon, as process `pid` would execute it. The two descriptors are ours to close."""

    pid: int
    program: list[str]
    words: list[str]
    shim_cgroup: str
    environment: dict[str, str]
    log_path: str
    listening_fd: int
    cwd_fd: int

    def close(self) -> None:
        """The descriptors are closed."""
        os.close(self.listening_fd)
        os.close(self.cwd_fd)


def receive(caller: socket.socket, pid: int) -> Request:
    """The request of the process `pid` at the other end of `caller`.

    Raises ValueError for a request that makes no sense, OSError for a caller that has gone or says
    nothing; then no descriptor of it stays open.
    """
    caller.settimeout(WITHIN_S)
    try:
        body, fds, flags, _ = socket.recv_fds(caller, zygote_client.MAX_REQUEST_BYTES, _FDS)
    except TimeoutError as error:
        raise TimeoutError(f"the request did not come within {WITHIN_S:g} s") from error
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("the request is cut")
        program, words, shim_cgroup, log_path, environment = zygote_client.decode(body)
        if program[0] != sys.executable:
            raise ValueError(f"interpreter {program[0]!r} is not ours")
        if len(fds) != _FDS:
            raise ValueError(f"{len(fds)} descriptors came, expected {_FDS}")
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    return Request(pid, program, words, shim_cgroup, environment, log_path, *fds)


def checked_peer(caller: socket.socket, world: World) -> int:
    """The pid of the process that connected, which lives in our world. Raises CallerDiffers, OSError.

    Source: unix(7), SO_PEERCRED.
    """
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    if (uid, gid) != (os.geteuid(), os.getegid()):
        raise CallerDiffers(f"process {pid} is of user {uid}, group {gid}")
    require_same_world(world, pid)
    return int(pid)


ZYGOTES_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
"""Signals that the zygote handles; an executed daemon finds them at their defaults."""
_GO_WITHIN_S = 10.0
"""A `start` that gives up hangs up, long before this."""


def become_daemon_of(caller_fd: int, request: Request, cgroups: ProcessCgroups) -> list[str]:
    """The words of the daemon which this process, just forked, now is, for the caller connected at `caller_fd`.

    The process ends when it cannot become like the caller, or the caller has gone.
    """
    try:
        for number in ZYGOTES_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # On a number that stays ours when the daemon's own descriptors are put in their places.
        with socket.socket(fileno=above_table(caller_fd)) as caller:
            os.close(caller_fd)
            try:
                _become_like(request, cgroups)
                become_daemon(request.listening_fd, open_log(request.log_path), keep=caller.fileno())
            except (OSError, CallerDiffers, CommandError) as error:
                refuse(caller, str(error))
                os._exit(0)
            caller.settimeout(_GO_WITHIN_S)
            caller.send(zygote_client.READY)
            # These steps cannot fail; the caller answers containerd meanwhile.
            set_environment(request.environment)
            with suppress(OSError):
                set_command_line([*request.program, *request.words])
            sys.argv[:] = [request.program[-1], *request.words]
            if caller.recv(len(zygote_client.GO)) != zygote_client.GO:
                os._exit(0)
        gc.enable()
        return request.words
    except BaseException as error:
        say(f"fork: {type(error).__name__}: {error}")
        os._exit(1)


def refuse(caller: socket.socket, reason: str) -> None:
    """The caller and the log have the reason why it gets no daemon."""
    say(f"refused: {reason}")
    with suppress(OSError):
        caller.send(
            zygote_client.NO + reason.encode(errors="replace")[: zygote_client.MAX_REPLY_BYTES - len(zygote_client.NO)]
        )


def say(text: str) -> None:
    """The zygote's log, its standard error, has this line."""
    with suppress(OSError):
        os.write(2, f"zygote: {text}\n".encode(errors="replace"))


def _become_like(request: Request, cgroups: ProcessCgroups) -> None:
    """This process has what an exec by the caller would have inherited; only the steps that can fail.

    Raises OSError, CallerDiffers, CommandError.
    """
    cgroups.join(cgroups.of(request.pid))
    become_like(request.pid)
    raise_oom_score(str(request.pid))
    os.fchdir(request.cwd_fd)
    join_cgroup(request.shim_cgroup)
