"""Removes a cgroup and every process that still runs in it. Works on v1 and v2 directories."""

import contextlib
import errno
import os
import signal
import time

from pyshim.host.processes import identity as processes
from pyshim.model.errors import DeadlineExceeded
from pyshim.resources.cgroups.host.hierarchies import members, write

_INIT = 1
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def remove_cgroup(path: str, deadline: float) -> None:
    """The cgroup and those below it are gone; their processes were killed, this one and init were moved out.

    Called for cgroups that the shim made, so their processes are the sandbox's. init is moved in any case, since its
    end is the node's. Idempotent. Raises DeadlineExceeded when a process does not die (uninterruptible I/O), OSError.
    """
    pause_s = _FIRST_PAUSE_S
    while not _removed(path):
        _empty(path)
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"remove cgroup {path!r}: still busy")
        # A dead process leaves its cgroup shortly after, and cgroup v1 has no event for that.
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _removed(path: str) -> bool:
    """Removes the cgroup and those below it as far as they are empty. True when it is gone."""
    try:
        with os.scandir(path) as entries:
            children = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return True
    if not all(_removed(child) for child in children):
        return False
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


def _empty(path: str) -> None:
    for directory, _, _ in os.walk(path):
        for pid in members(directory):
            if pid in (os.getpid(), _INIT):
                _move_out(pid, directory, path)
                continue
            ticks = processes.start_ticks(pid)
            if ticks is not None:
                _send_kill(processes.ProcessRef(pid, ticks), directory)


def _send_kill(process: processes.ProcessRef, directory: str) -> None:
    with contextlib.suppress(ProcessLookupError), processes.opened(process) as fd:
        # Checked after opening: a member now is the process of the fd, not a successor of its pid.
        if process.pid in members(directory):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


def _move_out(pid: int, directory: str, removed_root: str) -> None:
    """The process is in the nearest cgroup above `removed_root` that takes it; on v2 an inner one does not."""
    above = os.path.dirname(removed_root.rstrip("/"))
    while True:
        try:
            write(f"{above}/cgroup.procs", str(pid))
            return
        except FileNotFoundError:
            raise OSError(errno.EBUSY, "no cgroup above it takes the process", directory) from None
        except OSError:
            above = os.path.dirname(above)
