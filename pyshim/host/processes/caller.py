"""Compares a process that asks the zygote for a child with the zygote, and makes a child like it.

An exec inherits these properties from its caller; a fork of the zygote has to fetch them.
"""

import errno
import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import NamedTuple

from pyshim.host.mounts.table import mounts

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "user", "uts")
# Lines of /proc/PID/status: rights that a child of ours would not get from its caller. Source: proc(5).
_RIGHTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))


class CallerDiffers(Exception):
    """The caller differs from us in what `str(error)` names, so a child of ours cannot replace one of its own."""


class World(NamedTuple):
    """Properties that cannot be changed safely after a fork: they must be the same from the start."""

    namespaces: tuple[str, ...]
    root: tuple[int, int]
    rights: tuple[tuple[str, str], ...]
    label: str


def world_of(pid: int | str) -> World:
    """The world of a process. Raises OSError when it is gone or must not be looked at."""
    where = f"/proc/{pid}"
    root = os.stat(f"{where}/root")
    status = _status(where)
    return World(
        namespaces=tuple(_link(f"{where}/ns/{name}") for name in _NAMESPACES),
        root=(root.st_dev, root.st_ino),
        rights=tuple((name, status.get(name, "")) for name in _RIGHTS),
        label=_text(f"{where}/attr/current"),
    )


def require_same_world(ours: World, pid: int) -> None:
    """The process `pid` lives where we do, with our rights. Raises CallerDiffers naming the first difference."""
    try:
        theirs = world_of(pid)
    except OSError as error:
        raise CallerDiffers(f"process {pid} cannot be examined: {error.strerror}") from error
    for name, our_own, its_own in zip(_NAMESPACES, ours.namespaces, theirs.namespaces, strict=True):
        if our_own != its_own:
            raise CallerDiffers(f"process {pid} has another {name} namespace")
    if ours.root != theirs.root:
        raise CallerDiffers(f"process {pid} has another root directory")
    for (name, our_own), (_, its_own) in zip(ours.rights, theirs.rights, strict=True):
        if our_own != its_own:
            raise CallerDiffers(f"process {pid} differs in {name}")
    if ours.label != theirs.label:
        raise CallerDiffers(f"process {pid} has another security label")


class ProcessCgroups:
    """The mount points of the cgroup hierarchies, looked up once."""

    def __init__(self) -> None:
        self._mounts = [each for each in mounts() if each.kind in ("cgroup", "cgroup2")]

    def of(self, pid: int) -> str:
        """The control groups of process `pid`, as its file in /proc has them. Raises OSError."""
        with open(f"/proc/{pid}/cgroup") as file:
            return file.read()

    def join(self, groups: str) -> None:
        """We are in `groups`, the result of `of`, in every hierarchy. Raises CallerDiffers, OSError."""
        theirs, ours = _memberships(groups), _memberships(self.of(os.getpid()))
        for controllers, path in theirs.items():
            if ours.get(controllers) != path:
                self._join(controllers, path)

    def _join(self, controllers: str, path: str) -> None:
        wanted = set(controllers.split(","))
        for mount in self._mounts:
            known = {""} if mount.kind == "cgroup2" else {*mount.options}
            below = mount.root.rstrip("/")
            if wanted <= known and (path + "/").startswith(below + "/") and not path.startswith("/.."):
                inside = path[len(below) :].rstrip("/")
                with open(f"{mount.point}{inside}/cgroup.procs", "w") as file:
                    file.write("0")
                return
        raise CallerDiffers(f"cgroup {path!r} of {controllers or 'the unified hierarchy'} is mounted nowhere")


def become_like(pid: int) -> None:
    """We have the resource limits, umask, niceness and CPUs of process `pid`. Raises OSError."""
    if _text(f"/proc/{pid}/limits") != _text("/proc/self/limits"):
        for limit in _LIMITS:
            set_limit(limit, resource.prlimit(pid, limit))
    os.umask(int(_status(f"/proc/{pid}").get("Umask", "0022"), 8))
    niceness = os.getpriority(os.PRIO_PROCESS, pid)
    if niceness != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    run_on(os.sched_getaffinity(pid))


def run_on(cpus: set[int]) -> None:
    """We run on `cpus`, or where we do if all of them are offline: the kernel then moves their processes, too."""
    if not cpus or cpus == os.sched_getaffinity(0):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def set_limit(limit: int, values: tuple[int, int]) -> None:
    """setrlimit(2). Raises OSError, also where the module `resource` has made a ValueError of EPERM."""
    try:
        resource.setrlimit(limit, values)
    except ValueError as error:
        raise OSError(errno.EPERM, str(error)) from error


def set_environment(environment: Mapping[str, str]) -> None:
    """Our environment is `environment`, and no more; the local time is by its time zone."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()


def fresh_signals() -> None:
    """Signals are as in an interpreter that has just begun: none blocked, none handled but SIGINT."""
    status = _status("/proc/self")
    not_default = int(status["SigIgn"], 16) | int(status["SigCgt"], 16)
    for number in signal.valid_signals():  # the C library keeps two to itself
        if not_default >> (number - 1) & 1:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Signals that the interpreter ignores from its start. Source: cpython Python/pylifecycle.c, init_signals.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _memberships(text: str) -> dict[str, str]:
    rows = [line.split(":", 2) for line in text.split("\n") if line]
    return {controllers: place for _, controllers, place in rows}


def _status(where: str) -> dict[str, str]:
    with open(f"{where}/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""  # a kind of namespace this kernel does not have


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""  # no security module
