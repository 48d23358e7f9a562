"""Processes that are not children of this process: identified by pid and start time, killed through a pidfd."""

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from pyshim.host import syscalls
from pyshim.host.processes.stat import STOPPED, stat_fields
from pyshim.host.threads import in_short_thread
from pyshim.model.errors import DeadlineExceeded, InvalidArgument

R = TypeVar("R")

_STOP_WAIT_S = 0.5
"""Seconds for a process to stop; one in uninterruptible I/O does not."""
_STOP_PAUSE_S = 0.001
"""Seconds between two looks at it."""
_DEAD = (b"Z", b"X", b"x")


class ProcessRef(NamedTuple):
    """One process: the kernel gives its pid to another later, but not with the same start time."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when there is no such process, or only its zombie."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in _DEAD else int(fields[19])


def is_alive(process: ProcessRef) -> bool:
    """That very process runs."""
    return start_ticks(process.pid) == process.start_ticks


def find_by_argument(text: str) -> tuple[ProcessRef, ...]:
    """Processes with `text` in one word of their command line, this one excepted."""
    if len(text) < 8:
        raise InvalidArgument(f"find process by {text!r}: too short to be of one sandbox only")
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid() or not any(text in word for word in arguments(pid)):
            continue
        ticks = start_ticks(pid)
        if ticks is not None:
            found.append(ProcessRef(pid, ticks))
    return tuple(found)


def parent(pid: int) -> int:
    """The pid of its parent; 0 when there is no such process."""
    try:
        return int(stat_fields(pid)[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def arguments(pid: int) -> tuple[str, ...]:
    """The words of its command line; empty when there is no such process, or only a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = os.fsdecode(file.read()).removesuffix("\0")
            return tuple(text.split("\0")) if text else ()
    except (FileNotFoundError, ProcessLookupError):
        return ()


def executable(process: ProcessRef) -> str:
    """The path of the file it executes, of the interpreter for a script; empty when it has ended."""
    try:
        # The kernel's mark is on a file that was replaced meanwhile, as an upgrade does.
        path = as_user_of(process.pid, lambda: os.readlink(f"/proc/{process.pid}/exe"))
        return path.removesuffix(" (deleted)")
    except OSError:
        return ""


def program_name(process: ProcessRef) -> str:
    """The name of the file it executes, of the script when that is interpreted; empty when it has ended."""
    path = executable(process)
    if not path:
        return ""
    # `#!interpreter [argument]` puts the script's path behind them (execve(2)).
    script = next((word for word in arguments(process.pid)[1:3] if word.startswith("/") and is_script(word)), "")
    return os.path.basename(script or path)


def our_pid_namespace() -> int:
    """The inode of this process's pid namespace, as in /proc/pid/ns."""
    return os.stat("/proc/self/ns/pid").st_ino


def is_in_our_namespace(process: ProcessRef) -> bool:
    """That process lives in this process's pid namespace; False when it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def is_first_of_a_namespace_below_ours(process: ProcessRef) -> bool:
    """It is process 1 of a pid namespace right below ours; False when it has ended. Source: proc_pid_status(5)."""
    try:
        with open(f"/proc/{process.pid}/status", "rb") as file:
            pids = next((line.split()[1:] for line in file if line.startswith(b"NSpid:")), [])
    except OSError:
        return False
    return len(pids) == 2 and pids[1] == b"1"


def as_user_of(pid: int, read: Callable[[], R]) -> R:
    """The result of `read`, as the user of that process if it is another one. Raises as `read` does, and OSError.

    /proc shows a process's files and figures to its user, who has no capabilities here, and to CAP_SYS_PTRACE, which
    the shim has given up. Source: ptrace(2), "Ptrace access mode checking".
    """
    with open(f"/proc/{pid}/status", "rb") as file:
        ids = {line[:3]: line.split()[1:] for line in file if line.startswith((b"Uid:", b"Gid:"))}
    (user,), (group,) = ({int(word) for word in ids[name]} for name in (b"Uid", b"Gid"))
    if user == os.geteuid() or user != group or os.geteuid():
        return read()

    def become_and_read() -> R:
        syscalls.become_user(user, ())
        return read()

    return in_short_thread(become_and_read)


def is_of_user(process: ProcessRef, *user_ids: int) -> bool:
    """That process runs as one of these users; False when it has ended."""
    try:
        # Not the directory's owner: that is root for every process that has made itself undumpable.
        with open(f"/proc/{process.pid}/status", "rb") as file:
            users = next((line.split()[1:] for line in file if line.startswith(b"Uid:")), [])
    except OSError:
        return False
    return bool(users) and int(users[0]) in user_ids


def runs(process: ProcessRef, program: str) -> bool:
    """That process executes the file `program`, itself or through the interpreter of a script.

    A word of a command line alone is weak evidence: it is also in that of a search for it (`grep UUID`).
    """
    path = executable(process)
    if not path:
        return False
    if path == os.path.realpath(program):
        return True
    return is_script(program) and program in arguments(process.pid)[1:3]


def is_script(path: str) -> bool:
    """The kernel executes the file through an interpreter; False for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def kill_family(process: ProcessRef, deadline: float) -> None:
    """That process and its descendants have ended: virtiofsd serves from a child.

    Each is stopped before its children are looked for, so that none is started meanwhile. Idempotent; raises
    DeadlineExceeded, OSError. Once the process is gone its children cannot be distinguished from others.
    """
    family = [process] if is_alive(process) else []
    for member in family:  # which grows on the way
        _stop(member, min(deadline, time.monotonic() + _STOP_WAIT_S))
        family += children(member.pid)
    for member in family:  # all, before any is waited for: none may stay stopped at the deadline
        _send_kill(member)
    for member in family:
        kill(member, deadline)


def _stop(process: ProcessRef, deadline: float) -> None:
    """The process is stopped and starts no other. One in uninterruptible I/O does not stop, and is left to its KILL."""
    with contextlib.suppress(ProcessLookupError), opened(process) as fd:
        signal.pidfd_send_signal(fd, signal.SIGSTOP)
        while _runs(process.pid) and time.monotonic() < deadline:
            time.sleep(_STOP_PAUSE_S)


def _runs(pid: int) -> bool:
    """Some thread of it is neither stopped nor dead."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            if stat_fields(f"{pid}/task/{thread}")[0] not in (*STOPPED, *_DEAD):
                return True
    except (FileNotFoundError, ProcessLookupError):
        pass  # it, or a thread of it, has ended
    return False


def children(pid: int) -> list[ProcessRef]:
    """Its children that still run. Source: proc(5), /proc/pid/task/tid/children."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    pids: list[int] = []
    for thread in threads:
        path = f"/proc/{pid}/task/{thread}/children"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as file:
            pids += map(int, file.read().split())
    found = ((child, start_ticks(child)) for child in pids)
    return [ProcessRef(child, ticks) for child, ticks in found if ticks is not None]


def family(pids: Iterable[int]) -> Iterator[int]:
    """The processes and all their descendants, until a scan finds no further one.

    If the caller moves each process before it takes the next, later children start where their parent was moved to.
    """
    seen: set[int] = set()
    found = list(pids)
    while found:
        yield from found
        seen.update(found)
        found = sorted({child.pid for pid in seen for child in children(pid)} - seen)


def family_threads(pids: Iterable[int]) -> Iterator[int]:
    """The threads of a family, those that start meanwhile included.

    If the caller moves each thread before it takes the next, later threads start where their maker was moved to.
    """
    for pid in family(pids):
        seen: set[int] = set()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while new := {int(tid) for tid in os.listdir(f"/proc/{pid}/task")} - seen:
                yield from sorted(new)
                seen |= new


@contextlib.contextmanager
def opened(process: ProcessRef) -> Iterator[int]:
    """A pidfd of that very process. Raises ProcessLookupError when it has ended."""
    fd = os.pidfd_open(process.pid)
    try:
        # Checked after opening: the fd is that process, and not a successor of its pid.
        if not is_alive(process):
            raise ProcessLookupError
        yield fd
    finally:
        os.close(fd)


def _send_kill(process: ProcessRef) -> None:
    with contextlib.suppress(ProcessLookupError), opened(process) as fd:
        signal.pidfd_send_signal(fd, signal.SIGKILL)


def kill(process: ProcessRef, deadline: float) -> None:
    """That very process has ended, if only to a zombie. Idempotent; raises DeadlineExceeded, OSError."""
    with contextlib.suppress(ProcessLookupError), opened(process) as fd:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        wait_gone(fd, process.pid, deadline)


def wait_gone(pidfd: int, pid: int, deadline: float) -> None:
    """The process has ended. Raises DeadlineExceeded at `deadline` (of the monotonic clock)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"kill process {pid}: it did not end in time")


class Ends:
    """Calls back once for each watched process that ends; a pidfd each. Made in a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fds: set[int] = set()

    def watch(self, process: ProcessRef, when_ended: Callable[[], None]) -> None:
        """`when_ended` is called when that very process ends, or at the loop's next turn if it has ended.

        Raises OSError.
        """
        try:
            with opened(process) as pidfd:
                fd = os.dup(pidfd)
        except ProcessLookupError:
            self._loop.call_soon(when_ended)
            return

        def ended() -> None:
            self._forget(fd)
            when_ended()

        self._fds.add(fd)
        try:
            self._loop.add_reader(fd, ended)
        except OSError:
            self._forget(fd)
            raise

    def close(self) -> None:
        """Watches end. Idempotent."""
        for fd in tuple(self._fds):
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._fds.discard(fd)
        self._loop.remove_reader(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
