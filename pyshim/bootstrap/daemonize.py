"""From `start` to the daemon: the process that serves the socket, with nothing of its maker's left in it.

    fd 0, 1   /dev/null
    fd 2      the bundle's `log` FIFO (or /dev/null)
    fd 3      the listening socket

`become_daemon` does this to the calling process and can be used after any fork; `spawn` is fork, that, and exec.
"""

import posix

from pyshim.bootstrap.address import is_there
from pyshim.bootstrap.daemon import open_log
from pyshim.bootstrap.errors import BootstrapError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LISTENING_FD = 3
_FIRST_FREE_FD = 4
_MAX_OOM_SCORE_ADJ = 1000
_CGROUP_ROOT = "/sys/fs/cgroup"
_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, _PIDTYPE_PGID = 62, 1, 2


class Executed:
    """A daemon of ours that already serves."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def release(self) -> None:
        """It serves."""

    def end(self) -> None:
        """It has ended."""
        posix.kill(self._pid, 9)
        posix.waitpid(self._pid, 0)


def spawn(
    command: "list[str]", *, environment: "dict[str, str]", listening_fd: int, log_path: str, shim_cgroup: str
) -> int:
    """The pid of a new daemon that executes `command` in a session of its own, in our working directory.

    It is our child; it has one more point of OOM score than we have. Raises BootstrapError, and then there is no
    child: whatever failed on its side, the exec included, is reported by it and it is reaped.
    """

    def run() -> None:
        join_cgroup(shim_cgroup)
        raise_oom_score()
        try:
            posix.execve(command[0], command, environment)
        except OSError as error:
            raise os_failure("execute daemon", command[0], error) from error

    if environment.get("SCHED_CORE"):
        share_core_only_with_own()
    return _fork(run, listening_fd, log_path)


def become_daemon(listening_fd: int, log_fd: int, *, keep: "frozenset[int]" = frozenset()) -> None:
    """We lead a session of our own and have the file descriptors of the table above and `keep`, no others."""
    posix.setsid()
    null_fd = posix.open("/dev/null", posix.O_RDWR)
    # Out of the way first: any of these may sit on a number that is about to be overwritten.
    sources = [_above(fd, keep) for fd in (null_fd, null_fd, log_fd, listening_fd)]
    for target, source in enumerate(sources):
        posix.dup2(source, target, inheritable=True)
    for name in posix.listdir("/proc/self/fd"):
        fd = int(name)
        if fd >= _FIRST_FREE_FD and fd not in keep:
            _close(fd)


def raise_oom_score(of: str = "self") -> None:
    """The kernel prefers us to the process `of`, which has containerd's score, when memory runs out."""
    path = f"/proc/{of}/oom_score_adj"
    try:
        with open(path) as file:
            score = int(file.read())
        path = "/proc/self/oom_score_adj"
        with open(path, "w") as file:
            file.write(str(min(score + 1, _MAX_OOM_SCORE_ADJ)))
    except OSError as error:
        raise os_failure("write", path, error) from error


def join_cgroup(cgroup: str, root: str = _CGROUP_ROOT) -> None:
    """We are in `cgroup` (a path below the root of the hierarchy, or of every v1 hierarchy that has it)."""
    if not cgroup:
        return
    unified = is_there(f"{root}/cgroup.controllers")
    hierarchies = [root] if unified else [f"{root}/{name}" for name in sorted(posix.listdir(root))]
    tails = [f"{hierarchy}/{cgroup.lstrip('/')}/cgroup.procs" for hierarchy in hierarchies]
    found = [path for path in tails if is_there(path)]
    if not found:
        raise BootstrapError(f"join cgroup {cgroup!r}: no such cgroup below {root!r}")
    for path in found:
        try:
            with open(path, "w") as file:
                file.write("0")
        except OSError as error:
            raise os_failure("join cgroup", path, error) from error


def share_core_only_with_own() -> None:
    """Hyperthreads of one core run only this shim's processes together; what we fork inherits it.

    Asked for by containerd's SCHED_CORE variable. Source: kernel Documentation/admin-guide/hw-vuln/core-scheduling.rst.
    """
    from ctypes import CDLL, get_errno

    if CDLL(None, use_errno=True).prctl(_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _PIDTYPE_PGID, 0):
        raise os_failure("enable core scheduling of process", str(posix.getpid()), OSError(get_errno(), ""))


def _fork(run: "Callable[[], None]", listening_fd: int, log_path: str) -> int:
    # Close-on-exec: end of file without a word means that the exec took place.
    report_fd, child_fd = posix.pipe()
    try:
        pid = posix.fork()
    except OSError as error:
        posix.close(report_fd)
        posix.close(child_fd)
        raise os_failure("fork", "daemon", error) from error
    if pid == 0:
        _live_as_child(run, listening_fd, log_path, child_fd)
    posix.close(child_fd)
    with open(report_fd, "rb") as report:
        failure = report.read()
    if failure:
        posix.waitpid(pid, 0)
        raise BootstrapError(failure.decode(errors="replace"))
    return pid


def _live_as_child(run: "Callable[[], None]", listening_fd: int, log_path: str, report_fd: int) -> None:
    report_fd = _above(report_fd, frozenset())
    try:
        become_daemon(listening_fd, open_log(log_path), keep=frozenset({report_fd}))
        run()
    except BaseException as error:
        # Whatever it was, it is told and this process ends.
        text = str(error) if isinstance(error, BootstrapError) else f"start daemon: {type(error).__name__}: {error}"
        posix.write(report_fd, text.encode(errors="replace"))
    finally:
        posix._exit(127)


def _above(fd: int, keep: "frozenset[int]") -> int:
    """A duplicate of `fd`, closed on exec, on a number that is neither in our table nor in `keep`."""
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    return fcntl(fd, F_DUPFD_CLOEXEC, max((_FIRST_FREE_FD, *(kept + 1 for kept in keep))))


def _close(fd: int) -> None:
    try:
        posix.close(fd)
    except OSError:
        return  # The descriptor of the listing itself.
