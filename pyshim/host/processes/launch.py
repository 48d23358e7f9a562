"""posix_spawn with exactly the descriptors wanted, default signals, chosen namespaces and user; no waiting."""

import asyncio
import errno
import fcntl
import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import msgspec

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.view import View
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.caller import set_limit
from pyshim.host.threads import daemon_thread
from pyshim.model.confinement import NO_LABELS, ProcessLabels
from pyshim.model.errors import FailedPrecondition


class SpawnFailed(FailedPrecondition):
    """The program could not be started."""


@contextmanager
def file_actions(taken: Mapping[int, int | None]) -> Iterator[list[tuple[int, ...]]]:
    """posix_spawn's file actions that give a child exactly `taken`: {its number: ours, or None for /dev/null}.

    Our descriptors are first duplicated above every target number, so that no dup2 overwrites one still to be copied;
    descriptors we ourselves inherited without close-on-exec are closed.
    """
    above = max(taken) + 1
    with OwnedFd(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) as null, ExitStack() as copies:
        actions: list[tuple[int, ...]] = []
        for target, source in taken.items():
            own = null.fileno() if source is None else source
            copy = copies.enter_context(OwnedFd(fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, above)))
            actions.append((os.POSIX_SPAWN_DUP2, copy.fileno(), target))
        yield [*((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable_fds() if fd not in taken), *actions]


def _inheritable_fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


class User(msgspec.Struct, frozen=True, kw_only=True):
    """The user of a program that does not run as root."""

    id: int
    """Of the user, and of its group."""
    group_ids: tuple[int, ...] = ()
    """Further groups."""


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """Namespaces, user and rights in which a program differs from the shim; by default it does not differ."""

    netns_path: str | None = None
    empty_netns: bool = False
    """It is in a new network namespace, whose only link is a loopback that is down; it ends with the program."""
    view: View | None = None
    """It sees the files of this view only, and starts in their root."""
    own_processes: bool = False
    """It is the first process of a new process namespace, so it can name no process beside its own to signal it."""
    capabilities: frozenset[int] | None = None
    """The capabilities that it may have at most; an exec adds none. None: the shim's."""
    user: User | None = None
    """Its user, who has no capabilities."""
    labels: ProcessLabels = NO_LABELS
    """Of the program that is executed."""

    def enter(self) -> None:
        """This thread and the programs it executes have these properties for good. Raises SpawnFailed with the step."""
        set_labels(self.labels)  # by /proc, which a view may lack
        if self.netns_path is not None:
            with (
                os_errors(f"enter network namespace {self.netns_path!r}", SpawnFailed),
                OwnedFd(os.open(self.netns_path, os.O_RDONLY | os.O_CLOEXEC)) as namespace,
            ):
                syscalls.setns(namespace.fileno(), syscalls.CLONE_NEWNET)
        elif self.empty_netns:
            with os_errors("make network namespace", SpawnFailed):
                _enter_empty_netns()
        if self.own_processes:
            with os_errors("make process namespace", SpawnFailed):
                syscalls.unshare(syscalls.CLONE_NEWPID)
        if self.view is not None:
            with os_errors("enter view of the host's files", SpawnFailed):
                self.view.enter()
        if self.capabilities is not None:
            with os_errors("give up capabilities before the start", SpawnFailed):
                syscalls.limit_capabilities_of_programs(self.capabilities)
        if self.user is not None:
            become(self.user)


AS_THE_SHIM = Isolation()

NO_CORE_BYTES = 1
"""RLIMIT_CORE of a program that must not write its memory to the host. At 0 the kernel still pipes a core to a program,
systemd-coredump for one; at 1 it makes none. Source: the kernel's fs/coredump.c."""
_CORE_LIMIT = threading.Lock()
"""Limits belong to the process: while one thread starts a program with a lower one, the others start none."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    program: str
    argv: tuple[str, ...]
    env: dict[str, str]
    new_session: bool
    dumps_core: bool

    def run(self, actions: list[tuple[int, ...]]) -> int:
        """The child's pid. Signals it would inherit as ignored (Python ignores SIGPIPE) are at their defaults."""
        with _CORE_LIMIT, nullcontext() if self.dumps_core else _no_core():
            pid = os.posix_spawn(
                self.program,
                self.argv,
                self.env,
                file_actions=actions,
                setsid=self.new_session,
                setsigmask=(),
                setsigdef=_CATCHABLE,
            )
        if not self.dumps_core:
            # The hard limit too. It may have ended, or be of a user whose limits the shim may not change.
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_CORE, (NO_CORE_BYTES, NO_CORE_BYTES))
        return pid

    async def run_isolated(self, actions: list[tuple[int, ...]], isolation: Isolation) -> int:
        """`run` from a thread that ends at once: all that is in `isolation` belongs to a thread."""
        started: list[int] = []

        def work() -> int:
            try:
                isolation.enter()
            except SpawnFailed as error:
                raise SpawnFailed(f"start program {self.program!r}: {error}") from error
            started.append(self.run(actions))
            return started[0]

        thread, result = daemon_thread(f"spawn {self.program}", work)
        try:
            return await asyncio.shield(asyncio.wrap_future(result))
        except asyncio.CancelledError:
            thread.join()  # milliseconds; what it started has no owner yet, so it must not outlive this call
            for pid in started:
                kill_and_reap(pid)
            raise


@contextmanager
def _no_core() -> Iterator[None]:
    """Programs started within write no core, and nor do their children, from their first instruction on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = NO_CORE_BYTES if hard == resource.RLIM_INFINITY else min(NO_CORE_BYTES, hard)
    set_limit(resource.RLIMIT_CORE, (limit, hard))
    try:
        yield
    finally:
        set_limit(resource.RLIMIT_CORE, (soft, hard))


def kill_and_reap(pid: int) -> None:
    """A child of ours that has no watcher yet is killed and reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


_CATCHABLE = tuple(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def set_labels(labels: ProcessLabels, *, attr: str = "/proc/thread-self/attr", sys: str = "/sys") -> None:
    """The program that this thread executes next has the labels. Source: the kernel's Documentation/admin-guide/LSM.

    On a host without SELinux its label, which the runtime sets, is ignored. An AppArmor profile is the operator's
    request, so a host without AppArmor is an error. Raises SpawnFailed.
    """
    if labels.selinux and os.path.exists(f"{sys}/fs/selinux/enforce"):
        with os_errors(f"set SELinux label {labels.selinux!r}", SpawnFailed):
            _write_label(f"{attr}/exec", labels.selinux)
    if labels.apparmor:
        action = f"set AppArmor profile {labels.apparmor!r}"
        if not os.path.exists(f"{sys}/kernel/security/apparmor"):
            raise SpawnFailed(f"{action}: this host has no AppArmor")
        own = f"{attr}/apparmor/exec"  # since Linux 5.8
        with os_errors(action, SpawnFailed):
            _write_label(own if os.path.exists(own) else f"{attr}/exec", f"exec {labels.apparmor}")


def _write_label(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def become(user: User) -> None:
    """This thread and the programs it executes run as this user, for good."""
    with os_errors(f"become user {user.id}", SpawnFailed):
        syscalls.become_user(user.id, user.group_ids)


def _enter_empty_netns() -> None:
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
    except OSError as error:
        if error.errno != errno.EPERM or os.geteuid() == 0:
            raise
