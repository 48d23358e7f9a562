"""A child of the zygote: it becomes the daemon that an exec by its caller would have made.

It does so only for a caller of its own world (user, namespaces, rights), and it serves only once the caller has said
so: a child that comes late finds that its caller has gone, and ends.
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
from pyshim.start import zygote as link
from pyshim.start.daemonize import above_table, become_daemon, join_cgroup, open_log, raise_oom_score
from pyshim.start.errors import BootstrapError

ZYGOTES_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
"""What the zygote handles, and an executed daemon finds at its default."""
_REQUEST_WITHIN_S = 5.0
"""A `start` that gives up hangs up, long before this."""
_GO_WITHIN_S = 10.0
_FDS = 2


class _Request(NamedTuple):
    program: list[str]
    words: list[str]
    shim_cgroup: str
    environment: dict[str, str]
    log_path: str
    listening_fd: int
    cwd_fd: int


def become_daemon_of(caller_fd: int, world: World, cgroups: ProcessCgroups) -> list[str]:
    """The words of the daemon which this process, just forked, now is, for the caller connected at `caller_fd`.

    The process ends when the caller is not of our `world`, asks for nothing that makes sense, or has gone.
    """
    try:
        for number in ZYGOTES_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # On a number that stays ours when the daemon's own descriptors are put in their places.
        with socket.socket(fileno=above_table(caller_fd)) as caller:
            os.close(caller_fd)
            try:
                pid = _checked_peer(caller, world)
                request = _receive(caller)
                _become_like(pid, request, cgroups)
                become_daemon(request.listening_fd, open_log(request.log_path), keep=caller.fileno())
            except (OSError, ValueError, CallerDiffers, BootstrapError) as error:
                refuse(caller, str(error))
                os._exit(0)
            caller.settimeout(_GO_WITHIN_S)
            caller.send(link.READY)
            # What cannot fail, while the caller tells containerd.
            set_environment(request.environment)
            with suppress(OSError):
                set_command_line([*request.program, *request.words])
            sys.argv[:] = [request.program[-1], *request.words]
            if caller.recv(len(link.GO)) != link.GO:
                os._exit(0)
        gc.enable()
        return request.words
    except BaseException as error:
        say(f"fork: {type(error).__name__}: {error}")
        os._exit(1)


def refuse(caller: socket.socket, reason: str) -> None:
    """The caller has been told why it gets no daemon, and so has the log."""
    say(f"refused: {reason}")
    with suppress(OSError):
        caller.send(link.NO + reason.encode(errors="replace")[: link.MAX_REPLY_BYTES - len(link.NO)])


def say(text: str) -> None:
    """The zygote's log, its standard error, has this line."""
    with suppress(OSError):
        os.write(2, f"zygote: {text}\n".encode(errors="replace"))


def _checked_peer(caller: socket.socket, world: World) -> int:
    """The pid of the process that connected, which lives in our world. Raises CallerDiffers, OSError.

    Source: unix(7), SO_PEERCRED.
    """
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    if (uid, gid) != (os.geteuid(), os.getegid()):
        raise CallerDiffers(f"process {pid} is of user {uid}, group {gid}")
    require_same_world(world, pid)
    return int(pid)


def _receive(caller: socket.socket) -> _Request:
    """What the caller asks for; the descriptors that came are ours. Raises ValueError, OSError."""
    caller.settimeout(_REQUEST_WITHIN_S)
    body, fds, flags, _ = socket.recv_fds(caller, link.MAX_REQUEST_BYTES, _FDS)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("the request is cut")
    program, words, shim_cgroup, log_path, environment = link.decode(body)
    if program[0] != sys.executable:
        raise ValueError(f"interpreter {program[0]!r} is not ours")
    if len(fds) != _FDS:
        raise ValueError(f"{len(fds)} descriptors came, expected {_FDS}")
    return _Request(program, words, shim_cgroup, environment, log_path, *fds)


def _become_like(pid: int, request: _Request, cgroups: ProcessCgroups) -> None:
    """We have from the caller `pid` what an exec would have inherited and what can fail.

    Raises OSError, CallerDiffers, BootstrapError.
    """
    cgroups.join(cgroups.of(pid))
    become_like(pid)
    raise_oom_score(str(pid))
    os.fchdir(request.cwd_fd)
    join_cgroup(request.shim_cgroup)
