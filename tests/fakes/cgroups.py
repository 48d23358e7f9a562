"""Host cgroups in memory: who is where, what was written, in order."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from pyshim.model.confinement import Group, GroupSetting, HostOom, Scope
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from tests.fakes.deadlines import deadlines_of


@deadlines_of(LinuxCgroups)
class FakeCgroups:
    """`hit` is told every step before it happens and may raise."""

    def __init__(self, hit: Callable[[str], None]) -> None:
        self._hit = hit
        self.there: dict[str, set[int]] = {}
        """Processes by path."""
        self.descendants: dict[int, tuple[int, ...]] = {}
        """Processes below each of the moved ones."""
        self.threads: dict[str, tuple[int, ...]] = {}
        self.settings: list[tuple[str, str, str]] = []
        """(path, file, value), in order."""
        self.scopes: list[str] = []
        self.history: list[str] = []
        self.refused: dict[str, str] = {}
        """Files the kernel does not take, with its reason."""
        self.sets = {"cpus": "0-3", "mems": "0"}
        self.killed: HostOom | None = None
        self.classes: list[tuple[str, tuple[int, ...]]] = []
        """(resctrl group, processes) of every move."""
        self.pins: dict[int, tuple[int, ...]] = {}
        self.widened: list[int] = []
        """Threads and processes that may run on every CPU of their cgroups."""
        self.unpinnable: set[int] = set()
        """Threads and processes whose pinning the kernel refuses."""
        self.may_join, self.may_leave = asyncio.Event(), asyncio.Event()
        """Cleared, `join` or `leave` does not return: the kernel takes its time."""
        self.may_join.set()
        self.may_leave.set()

    def roots(self, group: Group) -> tuple[str, ...]:
        return ("/cg",)

    async def occupants(self, groups: tuple[Group, ...]) -> Mapping[str, int]:
        return {group.path: pid for group in groups for pid in self.there.get(group.path, ())}

    def hasten_moves(self) -> None:
        pass

    async def make(self, groups: tuple[Group, ...]) -> tuple[str, ...]:
        for group in groups:
            self._hit("make_cgroup")
            self.there[group.path] = set()
        return ()

    async def start_scope(self, scope: Scope) -> None:
        self._hit("start_scope")
        self.scopes.append(scope.unit)

    async def join(self, group: Group, pids: Iterable[int]) -> None:
        self._hit("join_cgroup")
        await self.may_join.wait()
        for pid in pids:
            for members in self.there.values():
                members.discard(pid)
            self.there[group.path].add(pid)
            self.history.append(f"{pid} into {group.path}")

    async def join_family(self, group: Group, pids: Iterable[int]) -> None:
        await self.join(group, [member for pid in pids for member in (pid, *self.descendants.get(pid, ()))])

    async def join_threads(self, group: Group, tids: Iterable[int]) -> None:
        self._hit("join_threads")
        self.threads[group.path] = (*self.threads.get(group.path, ()), *tids)

    async def leave(self, groups: tuple[Group, ...]) -> None:
        await self.may_leave.wait()
        for group in groups:
            self.there.get(group.path, set()).clear()

    async def apply(self, group: Group, settings: Iterable[GroupSetting]) -> Mapping[GroupSetting, str]:
        failed = {}
        for setting in settings:
            if problem := self.refused.get(setting.file):
                failed[setting] = problem
            else:
                self.settings.append((group.path, setting.file, setting.value))
        return failed

    async def allowed(self, group: Group, name: str) -> str:
        return self.sets[name]

    async def oom(self, group: Group) -> HostOom | None:
        return self.killed

    async def usage(self, group: Group) -> Mapping[str, int]:
        self._hit("usage")
        return {"cpu_ns": 5_000_000, "memory_bytes": 3 << 20, "processes": 7}

    async def device_rules(self, paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
        return tuple((f"b 8:{number} rwm", path) for number, path in enumerate(paths))

    async def join_class(self, name: str, pids: Iterable[int]) -> None:
        self._hit("join_class")
        self.classes.append((name, tuple(pids)))

    async def pin(self, tid: int, cpus: Iterable[int]) -> str:
        if tid in self.unpinnable:
            return "EINVAL"
        if wanted := tuple(sorted(cpus)):
            self.pins[tid] = wanted
        else:
            self.pins.pop(tid, None)
            self.widened.append(tid)
        return ""

    async def pin_family(self, pid: int, cpus: Iterable[int], but: Collection[int]) -> str:
        return await self.pin(pid, cpus)

    def release(self, path: str) -> None:
        self.there.pop(path, None)
