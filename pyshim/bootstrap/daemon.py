"""A daemon for a container's `start`: had from the node's zygote, or else executed."""

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

    from pyshim.bootstrap.daemonize import Executed
    from pyshim.bootstrap.zygote import Forked


def make_daemon(
    program: "list[str]",
    words: "list[str]",
    *,
    environment: "dict[str, str]",
    listening_fd: int,
    log_path: str,
    shim_cgroup: str,
    zygote: "socket | None",
    zygote_dir: str,
) -> "Forked | Executed":
    """A daemon that serves, as `program` with `words`, once it is released: had from `zygote`, or else `spawn`'s.

    `zygote` is a connection to it, ours. Where none could give a fork, one is started if PYSHIM_ZYGOTE asks for it
    (bootstrap/zygote.py).
    """
    if zygote is not None:
        from pyshim.bootstrap.zygote import fork_daemon

        log_fd = open_log(log_path)
        try:
            forked = fork_daemon(
                zygote,
                program,
                words,
                environment=environment,
                listening_fd=listening_fd,
                log_fd=log_fd,
                shim_cgroup=shim_cgroup,
            )
        finally:
            posix.close(log_fd)
        if forked is not None:
            return forked
    if environment.get("PYSHIM_ZYGOTE") == "auto" and not environment.get("SCHED_CORE"):
        from pyshim.bootstrap.zygote import launch

        launch(program, environment, zygote_dir)
    from pyshim.bootstrap.daemonize import Executed, spawn

    pid = spawn(
        [*program, *words],
        environment=environment,
        listening_fd=listening_fd,
        log_path=log_path,
        shim_cgroup=shim_cgroup,
    )
    return Executed(pid)


def open_log(path: str) -> int:
    """The bundle's log, or /dev/null where it has none.

    The FIFO is opened for reading too: so the open never waits for containerd, a write never meets EPIPE, and what we
    say while containerd restarts waits in the pipe for the next one.
    """
    try:
        return posix.open(path, posix.O_RDWR | posix.O_NONBLOCK | posix.O_CLOEXEC)
    except OSError:
        return posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
