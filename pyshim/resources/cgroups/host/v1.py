"""cgroup v1: a directory in each hierarchy, threads placed one by one. Hybrid hosts have their controllers here."""

import contextlib
import os
from collections.abc import Iterable, Iterator

from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.model.confinement import Group, GroupSetting, HostOom
from pyshim.resources.cgroups.host import hierarchies as kernel

_THREADED = ("cpu", "cpuacct", "cpuset")
"""Controllers that count threads one by one. Memory follows the owner of the address space."""


class CgroupsV1:
    def __init__(self, hierarchies: tuple[kernel.Hierarchy, ...]) -> None:
        self._hierarchies = tuple(each for each in hierarchies if each.controllers)
        # Read at once: later systemd moves this process into the scope.
        places = kernel.places_of(os.getpid())
        self._origin = {each.mount_point: places.get(frozenset(each.controllers), "") for each in self._hierarchies}
        """The cgroup this process came from, by hierarchy."""

    def roots(self, group: Group) -> tuple[str, ...]:
        """The mount points of the group's hierarchies."""
        return tuple(each.mount_point for each in self._of(group))

    def _of(self, group: Group, only: tuple[str, ...] = ()) -> Iterator[kernel.Hierarchy]:
        for each in self._hierarchies:
            if group.controllers and not set(group.controllers) & set(each.controllers):
                continue
            if not only or set(only) & set(each.controllers):
                yield each

    def make(self, group: Group) -> tuple[str, ...]:
        """The group exists and can take processes. Returns no notes. Raises FailedPrecondition naming the directory."""
        for each in self._of(group):
            path = each.mount_point
            for name in group.path.strip("/").split("/"):
                above, path = path, f"{path}/{name}"
                kernel.make_directory(path)
                if "cpuset" in each.controllers:
                    _inherit_cpuset(path, above)
        return ()

    def stay(self) -> None:
        """Moves this process to the cgroup in which it is, if visible; in one hierarchy, since all share the lock."""
        for mount_point, origin in self._origin.items():
            if origin:
                with contextlib.suppress(OSError):
                    kernel.write(f"{mount_point}{origin}/cgroup.procs", "0")
                return

    def join(self, group: Group, pid: int) -> None:
        for each in self._of(group):
            kernel.move(each.mount_point + group.path, "cgroup.procs", pid)

    def join_thread(self, group: Group, tid: int) -> None:
        for each in self._of(group, _THREADED):
            kernel.move(each.mount_point + group.path, "tasks", tid)

    def leave(self, group: Group) -> None:
        """This process and its children are in its former cgroup, or in the nearest existing one above it."""
        for each in self._of(group):
            origin = self._origin.get(each.mount_point, "")
            back = f"{each.mount_point}{origin}" if origin else ""
            for pid in kernel.own_children(each.mount_point + group.path):
                kernel.move(back if os.path.isdir(back) else each.mount_point, "cgroup.procs", pid)

    def apply_all(self, group: Group, settings: Iterable[GroupSetting]) -> dict[GroupSetting, str]:
        """Writes the settings; returns those that the kernel refused, each with the reason."""
        return {setting: problem for setting in settings if (problem := self.apply(group, setting))}

    def apply(self, group: Group, setting: GroupSetting) -> str:
        """Writes the setting; returns the error, empty on success."""
        each = next((each for each in self._of(group) if setting.controller in each.controllers), None)
        if each is None:
            return f"controller {setting.controller} is not mounted"
        directory = each.mount_point + group.path
        value = setting.value
        if not value:  # v1 has no value that means the set of the cgroup above
            value = kernel.read(f"{os.path.dirname(directory)}/{setting.file}").strip()
        try:
            kernel.write(f"{directory}/{setting.file}", value)
        except OSError as error:
            return describe_os_error(error)
        return ""

    def allowed(self, group: Group, name: str) -> str:
        """The list of `cpus` or `mems` of the cgroup above; empty without the controller."""
        each = next(self._of(group, ("cpuset",)), None)
        above = group.path.rpartition("/")[0]
        return kernel.read(f"{each.mount_point}{above}/cpuset.{name}").strip() if each else ""

    def oom(self, group: Group) -> HostOom | None:
        """The cgroup whose limit was met, if the OOM killer took a process of the group."""
        each = next(self._of(group, ("memory",)), None)
        if each is None or not kernel.keyed(f"{each.mount_point}{group.path}/memory.oom_control", "oom_kill"):
            return None
        met: list[tuple[int, str]] = []
        for path in kernel.upwards(group.path):
            limit = kernel.number(f"{each.mount_point}{path}/memory.limit_in_bytes")
            if limit is not None and kernel.number(f"{each.mount_point}{path}/memory.failcnt"):
                met.append((limit, path or "/"))
        limit_bytes, limited_by = min(met, default=(0, ""))
        return HostOom(limited_by=limited_by, limit_bytes=limit_bytes)


def _inherit_cpuset(path: str, above: str) -> None:
    """Fills an empty v1 cpuset, which takes no process. Source: cpuset(7)."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if kernel.read(f"{path}/{name}").strip():
            continue
        with os_errors(f"write '{path}/{name}'"):
            kernel.write(f"{path}/{name}", kernel.read(f"{above}/{name}").strip())
