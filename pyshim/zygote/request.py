"""A request of `start` to the zygote. All of it is checked before the fork, so the child has little to do."""

import os
import socket
import struct
import sys
from typing import NamedTuple

from pyshim.host.processes.caller import CallerDiffers, World, require_same_world
from pyshim.start import zygote as link

_WITHIN_S = 1.0
"""Other callers wait meanwhile. `start` sends its request as soon as it is connected."""
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


def receive(caller: socket.socket, world: World) -> Request:
    """The request of the process at the other end of `caller`, which lives in our `world`.

    Raises CallerDiffers, ValueError for a request that makes no sense, OSError for a caller that has gone or says
    nothing; then no descriptor of it stays open.
    """
    pid = _checked_peer(caller, world)
    caller.settimeout(_WITHIN_S)
    try:
        body, fds, flags, _ = socket.recv_fds(caller, link.MAX_REQUEST_BYTES, _FDS)
    except TimeoutError as error:
        raise TimeoutError(f"the request did not come within {_WITHIN_S:g} s") from error
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("the request is cut")
        program, words, shim_cgroup, log_path, environment = link.decode(body)
        if program[0] != sys.executable:
            raise ValueError(f"interpreter {program[0]!r} is not ours")
        if len(fds) != _FDS:
            raise ValueError(f"{len(fds)} descriptors came, expected {_FDS}")
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    return Request(pid, program, words, shim_cgroup, environment, log_path, *fds)


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
