"""The host's cgroups as one sandbox uses them: the seam `Cgroups`, over v1 or v2, in threads; and its resctrl group.

The node's administrator makes and removes the resctrl groups. Source: the kernel's arch/x86/resctrl.rst: a write of a
number to `tasks` moves one thread, and a new thread or process begins in the group of the one that made it.
"""

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping

from pyshim.concurrency.deadlines import CHANGE_S, READ_S, within_s
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import family, family_threads
from pyshim.host.threads import in_thread, thread_to_the_end
from pyshim.model.confinement import Group, GroupSetting, HostOom, Scope
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.host_facts import CgroupMode
from pyshim.resources.cgroups.host import hierarchies as cgroup_mounts
from pyshim.resources.cgroups.host.systemd_scope import start_scope
from pyshim.resources.cgroups.host.usage import usage
from pyshim.resources.cgroups.host.v1 import CgroupsV1
from pyshim.resources.cgroups.host.v2 import CgroupsV2
from pyshim.resources.cgroups.plan.cgroups import ROOT_CLASS

log = logging.getLogger(__name__)

RESCTRL = "/sys/fs/resctrl"
EVERY_CPU = frozenset(range(os.sysconf("SC_NPROCESSORS_CONF")))
"""Also those that are offline. The kernel takes of a mask the CPUs that the thread's cpuset has (cpuset(7))."""


def _paths(groups: tuple[Group, ...]) -> str:
    return ", ".join(repr(group.path) for group in groups)


class LinuxCgroups:
    """The cgroups of one sandbox. Every method raises ShimError naming the cgroup."""

    def __init__(self, mode: CgroupMode, hierarchies: tuple[cgroup_mounts.Hierarchy, ...]) -> None:
        self._tree = CgroupsV2(hierarchies) if mode is CgroupMode.V2 else CgroupsV1(hierarchies)

    def roots(self, group: Group) -> tuple[str, ...]:
        """The mount points below which `group.path` is, or will be."""
        return self._tree.roots(group)

    @within_s(READ_S, lambda self, groups: f"look into cgroups {_paths(groups)}")
    async def occupants(self, groups: tuple[Group, ...]) -> Mapping[str, int]:
        """By its path, a process that is in the group or below it, this one excepted. A group with none is left out."""

        def look() -> Mapping[str, int]:
            return {group.path: pid for group in groups if (pid := self._occupant(group))}

        return await in_thread(look)

    def _occupant(self, group: Group) -> int:
        for root in self._tree.roots(group):
            for directory, _, _ in os.walk(root + group.path):
                for pid in cgroup_mounts.members(directory):
                    if pid != os.getpid():
                        return pid
        return 0

    def hasten_moves(self) -> None:
        """A thread has begun to make moves between cgroups fast, for the next milliseconds. A failure is logged.

        The first of several moves waits for a grace period of RCU, 10 to 20 ms. Here that is a move of this process to
        the cgroup that it is in. Sources: the kernel's kernel/cgroup/cgroup.c, cgroup_attach_lock; kernel/rcu/sync.c.
        """

        def stay() -> None:
            try:
                self._tree.stay()
            except (ShimError, OSError) as exc:
                log.debug("hasten moves between cgroups", extra={"error": str(exc)})

        with contextlib.suppress(RuntimeError):  # no thread can be started, and this only saves time
            asyncio.get_running_loop().run_in_executor(None, stay)

    @within_s(CHANGE_S, lambda self, groups: f"make cgroups {_paths(groups)}")
    async def make(self, groups: tuple[Group, ...]) -> tuple[str, ...]:
        """The cgroups exist. Returns a note for each thing that they lack."""
        notes: list[str] = []

        def make() -> None:
            for group in groups:
                notes.extend(self._tree.make(group))

        await thread_to_the_end(make)
        return tuple(notes)

    @within_s(CHANGE_S, "start scope '{scope.unit}'")
    async def start_scope(self, scope: Scope) -> None:
        """The unit runs with this process in it. Raises ShimError when systemd refuses or says nothing."""
        await thread_to_the_end(start_scope, scope, os.getpid())

    @within_s(CHANGE_S, "join cgroup '{group.path}'")
    async def join(self, group: Group, pids: Iterable[int]) -> None:
        await thread_to_the_end(_move, self._tree.join, group, pids)

    @within_s(CHANGE_S, "join cgroup '{group.path}'")
    async def join_family(self, group: Group, pids: Iterable[int]) -> None:
        """The processes and all their descendants are in the group: virtiofsd serves from a child."""
        await thread_to_the_end(_move, self._tree.join, group, family(pids))

    @within_s(CHANGE_S, "move threads into cgroup '{group.path}'")
    async def join_threads(self, group: Group, tids: Iterable[int]) -> None:
        """The threads are in the group, in hierarchies that place threads apart from their process."""
        await thread_to_the_end(_move, self._tree.join_thread, group, tids)

    @within_s(CHANGE_S, "leave cgroups")
    async def leave(self, groups: tuple[Group, ...]) -> None:
        """This process and its children are in none of the groups."""

        def leave() -> None:
            for group in groups:
                self._tree.leave(group)

        await thread_to_the_end(leave)

    @within_s(CHANGE_S, "set limits of cgroup '{group.path}'")
    async def apply(self, group: Group, settings: Iterable[GroupSetting]) -> Mapping[GroupSetting, str]:
        """Every setting was tried, in order. Returns those that the kernel refused, each with the reason."""
        failed: dict[GroupSetting, str] = {}
        await thread_to_the_end(lambda: failed.update(self._tree.apply_all(group, settings)))
        return failed

    @within_s(READ_S, "read cpuset.{name} of cgroup '{group.path}'")
    async def allowed(self, group: Group, name: str) -> str:
        """The list of `cpus` or `mems` of the cgroup above; empty if it is unknown."""
        return await in_thread(self._tree.allowed, group, name)

    @within_s(READ_S, "read oom counters of cgroup '{group.path}'")
    async def oom(self, group: Group) -> HostOom | None:
        return await in_thread(self._tree.oom, group)

    @within_s(READ_S, "read usage of cgroup '{group.path}'")
    async def usage(self, group: Group) -> Mapping[str, int]:
        """Figures by the names of `usage.py`, without those that the kernel does not have."""
        return await in_thread(usage, group.path)

    @within_s(READ_S, "look at device nodes")
    async def device_rules(self, paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """(rule, path) for each device that exists; VFIO groups by their major number, so also for later ones."""
        return await in_thread(_device_rules, tuple(paths))

    @within_s(CHANGE_S, "join RDT class '{name}'")
    async def join_class(self, name: str, pids: Iterable[int]) -> None:
        """All threads of the processes and of their descendants are in the resctrl group of that name."""
        await thread_to_the_end(join_rdt_class, name, tuple(pids))

    @within_s(CHANGE_S, "pin thread {tid}")
    async def pin(self, tid: int, cpus: Iterable[int]) -> str:
        """The thread runs on these CPUs only; without any, on all of its cgroup, also those that it gets later.

        Returns the reason when the kernel refuses, else an empty text.
        """
        try:
            os.sched_setaffinity(tid, tuple(cpus) or EVERY_CPU)
        except ProcessLookupError:
            return ""
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    @within_s(CHANGE_S, "pin process {pid} and its children")
    async def pin_family(self, pid: int, cpus: Iterable[int], but: Collection[int]) -> str:
        """All threads of a process and of its descendants, except those in `but`, run on these CPUs only, as of `pin`.

        Returns the reason when the kernel refuses.
        """
        wanted, problem = tuple(cpus), ""
        for tid in family_threads((pid,)):
            if tid not in but:
                problem = await self.pin(tid, wanted) or problem
        return problem


def _move(join: Callable[[Group, int], None], group: Group, numbers: Iterable[int]) -> None:
    for number in numbers:
        join(group, number)


def _device_rules(paths: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            kind = {stat.S_IFBLK: "b", stat.S_IFCHR: "c"}.get(stat.S_IFMT(status.st_mode))
            if kind:
                found[f"{kind} {os.major(status.st_rdev)}:{os.minor(status.st_rdev)} rwm"] = path
    for line in cgroup_mounts.read("/proc/devices").splitlines():
        words = line.split()
        if len(words) == 2 and words[1] in ("vfio", "vfio-dev"):
            found[f"c {words[0]}:* rwm"] = words[1]
    return tuple(found.items())


def join_rdt_class(name: str, pids: Iterable[int], root: str = RESCTRL) -> None:
    """All threads of the processes and of their descendants are in the group.

    Raises FailedPrecondition when the group is missing or the kernel refuses.
    """
    directory = root if name == ROOT_CLASS else f"{root}/{name}"
    try:
        tasks = os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        is_mounted = os.path.exists(f"{root}/schemata")
        hint = "" if is_mounted else f" (hint: mount -t resctrl resctrl {RESCTRL})"
        cause = f"open '{directory}/tasks': {describe_os_error(error)}{hint}"
        raise FailedPrecondition(f"join RDT class {name!r}: {cause}") from error
    try:
        for tid in family_threads(pids):
            with contextlib.suppress(ProcessLookupError):
                os.write(tasks, f"{tid}\n".encode())
    except OSError as error:
        cause = f"{describe_os_error(error)}{_last_words(root)}"
        raise FailedPrecondition(f"join RDT class {name!r}: {cause}") from error
    finally:
        os.close(tasks)


def _last_words(root: str) -> str:
    """resctrl's own error text for a refused write."""
    try:
        with open(f"{root}/info/last_cmd_status", encoding="utf-8", errors="replace") as file:
            said = file.read(1000).strip()
    except OSError:
        return ""
    return f": {said}" if said not in ("", "ok") else ""
