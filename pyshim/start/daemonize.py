"""Makes the daemon that serves the socket. It has these file descriptors only:

    fd 0, 1   /dev/null
    fd 2      the bundle's `log` FIFO (or /dev/null)
    fd 3      the listening socket

`become_daemon` does this to the calling process and can be used after any fork; `spawn` is fork, that, and exec.
"""

import fcntl
import os

from pyshim.start.invocation import CommandError, os_failure

LISTENING_FD = 3
_FIRST_FREE_FD = 4
_MAX_OOM_SCORE_ADJ = 1000
_CGROUP_ROOT = "/sys/fs/cgroup"
_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, _PIDTYPE_PGID = 62, 1, 2


def spawn(
    command: list[str], *, environment: dict[str, str], listening_fd: int, log_path: str, shim_cgroup: str
) -> int:
    """The pid of a new daemon that executes `command` in a session of its own, in our working directory.

    It is our child; it has one more point of OOM score than we have. Raises CommandError when
    any step failed, the exec included; the child has reported it then and is reaped.
    """
    if environment.get("SCHED_CORE"):
        _share_core_only_with_own()
    # Close-on-exec: an end of file without a text means that the exec succeeded.
    report_fd, child_fd = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(report_fd)
        os.close(child_fd)
        raise os_failure("fork", "daemon", error) from error
    if pid == 0:
        _execute(command, environment, listening_fd, log_path, shim_cgroup, child_fd)
    os.close(child_fd)
    with open(report_fd, "rb") as report:
        failure = report.read()
    if failure:
        os.waitpid(pid, 0)
        raise CommandError(failure.decode(errors="replace"))
    return pid


def become_daemon(listening_fd: int, log_fd: int, *, keep: int) -> None:
    """We lead a session of our own and have the file descriptors of the table above and `keep`, no others.

    `keep` is a number that is not in the table.
    """
    os.setsid()
    null_fd = os.open(os.devnull, os.O_RDWR)
    # Duplicated first: any of these may have a number that is overwritten next.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, keep + 1) for fd in (null_fd, null_fd, log_fd, listening_fd)]
    for target, source in enumerate(sources):
        os.dup2(source, target, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd >= _FIRST_FREE_FD and fd != keep:
            _close(fd)


def above_table(fd: int) -> int:
    """A duplicate of `fd`, closed on exec, on a number that is not in the daemon's table."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)


def open_log(path: str) -> int:
    """The bundle's log, or /dev/null where it has none.

    The FIFO is opened for reading, too. So the open never waits for containerd, a write never meets EPIPE, and lines
    written while containerd restarts wait in the pipe.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return  # the descriptor of the listing itself


def raise_oom_score(of: str = "self") -> None:
    """When memory runs out, the kernel kills us before the process `of`, which has containerd's score."""
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
    unified = os.path.exists(f"{root}/cgroup.controllers")
    hierarchies = [root] if unified else [f"{root}/{name}" for name in sorted(os.listdir(root))]
    tails = [f"{hierarchy}/{cgroup.lstrip('/')}/cgroup.procs" for hierarchy in hierarchies]
    found = [path for path in tails if os.path.exists(path)]
    if not found:
        raise CommandError(f"join cgroup {cgroup!r}: no such cgroup below {root!r}")
    for path in found:
        try:
            with open(path, "w") as file:
                file.write("0")
        except OSError as error:
            raise os_failure("join cgroup", path, error) from error


def _execute(
    command: list[str], environment: dict[str, str], listening_fd: int, log_path: str, shim_cgroup: str, report_fd: int
) -> None:
    """In the child: executes `command`, or writes the reason why it cannot to `report_fd`, and ends."""
    report_fd = above_table(report_fd)
    try:
        become_daemon(listening_fd, open_log(log_path), keep=report_fd)
        join_cgroup(shim_cgroup)
        raise_oom_score()
        try:
            os.execve(command[0], command, environment)
        except OSError as error:
            raise os_failure("execute daemon", command[0], error) from error
    except BaseException as error:
        text = str(error) if isinstance(error, CommandError) else f"start daemon: {type(error).__name__}: {error}"
        os.write(report_fd, text.encode(errors="replace"))
    finally:
        os._exit(127)


def _share_core_only_with_own() -> None:
    """Hyperthreads of one core run only this shim's processes together; children inherit it.

    containerd asks for it by its variable SCHED_CORE. Source: kernel
    Documentation/admin-guide/hw-vuln/core-scheduling.rst.
    """
    import ctypes  # heavy, and few nodes set SCHED_CORE

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _PIDTYPE_PGID, 0):
        raise os_failure("enable core scheduling of process", str(os.getpid()), OSError(ctypes.get_errno(), ""))
