"""cgroup v2: one directory per group, controllers enabled from above, vCPU threads in a threaded cgroup."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

from pyshim.host.os_errors import describe_os_error
from pyshim.model.confinement import Group, GroupSetting, HostOom
from pyshim.resources.cgroups.host import hierarchies as kernel
from pyshim.resources.cgroups.host.device_program import DeviceList

_WANTED = ("cpu", "cpuset", "io", "memory", "pids")
_THREADED = ("cpu", "cpuset")


class CgroupsV2:
    def __init__(self, hierarchies: tuple[kernel.Hierarchy, ...]) -> None:
        self._root = next((each.mount_point for each in hierarchies if not each.controllers), "/sys/fs/cgroup")
        # Read at once: later systemd moves this process into the scope.
        self._origin = kernel.place_of(os.getpid(), ())
        self._devices: dict[str, DeviceList] = {}
        """By directory."""

    def roots(self, group: Group) -> tuple[str, ...]:
        return (self._root,)

    def make(self, group: Group) -> tuple[str, ...]:
        """The group exists. Returns a note for each controller that it lacks. Raises FailedPrecondition."""
        if group.threaded:
            return self._make_threaded(group)
        notes: dict[str, str] = {}
        path = self._root
        for name in group.path.strip("/").split("/"):
            for controller, problem in _enable(path, _WANTED, occupied=_is_occupied(path)):
                notes.setdefault(controller, f"no controller {controller} below '{path}': {problem}")
            path = f"{path}/{name}"
            kernel.make_directory(path)
        has = kernel.read(f"{path}/cgroup.controllers").split()
        return tuple(note for controller, note in notes.items() if controller not in has)

    def _make_threaded(self, group: Group) -> tuple[str, ...]:
        """The group is threaded if the hierarchy permits it; else vCPU threads stay with their process."""
        directory = self._root + group.path
        kernel.make_directory(directory)
        try:
            # First threaded, then the controllers: the cgroup above has processes, which only threaded ones may share.
            kernel.write(f"{directory}/cgroup.type", "threaded")
        except OSError as error:
            return (f"'{group.path}' has no members: it cannot be threaded: {describe_os_error(error)}",)
        above = os.path.dirname(directory)
        return tuple(
            f"no controller {controller} for vCPU threads: {problem}"
            for controller, problem in _enable(above, _THREADED, occupied=False)
        )

    def stay(self) -> None:
        """Moves this process to the cgroup in which it is, if visible."""
        if self._origin:
            with contextlib.suppress(OSError):
                kernel.write(f"{self._root}{self._origin}/cgroup.procs", "0")

    def join(self, group: Group, pid: int) -> None:
        if group.threaded and not self._is_threaded(group):
            return  # the processes stay where they are, as its notes say
        kernel.move(self._root + group.path, "cgroup.procs", pid)

    def join_thread(self, group: Group, tid: int) -> None:
        if self._is_threaded(group):
            kernel.move(self._root + group.path, "cgroup.threads", tid)

    def _is_threaded(self, group: Group) -> bool:
        return kernel.read(f"{self._root}{group.path}/cgroup.type").strip() == "threaded"

    def leave(self, group: Group) -> None:
        """This process and its children are in its former cgroup, or in the nearest one above that takes them."""
        if devices := self._devices.pop(self._root + group.path, None):
            devices.close()
        if group.threaded:
            return
        above = tuple(kernel.upwards(group.path.rpartition("/")[0]))
        for pid in kernel.own_children(self._root + group.path):
            for place in (self._origin.rstrip("/"), *above):
                try:
                    kernel.write(f"{self._root}{place}/cgroup.procs", str(pid))
                    break
                except ProcessLookupError:
                    break
                except OSError:
                    continue  # it has controllers for cgroups below it, or does not exist: try the next one above

    def apply_all(self, group: Group, settings: Iterable[GroupSetting]) -> dict[GroupSetting, str]:
        """Writes the settings; returns those that the kernel refused, each with the reason.

        The device rules, in v1's form, become one program.
        """
        settings = tuple(settings)
        rules = tuple(each for each in settings if each.controller == "devices")
        failed = dict.fromkeys(rules, self._list_devices(group, rules)) if rules else {}
        failed |= {each: self.apply(group, each) for each in settings if each not in failed}
        return {setting: problem for setting, problem in failed.items() if problem}

    def apply(self, group: Group, setting: GroupSetting) -> str:
        directory = self._root + group.path
        try:
            # The kernel refuses an empty set while it is in use, so the set of the cgroup above is written.
            value = setting.value or self.allowed(group, setting.file.rpartition(".")[2])
            kernel.write(f"{directory}/{setting.file}", value)
        except FileNotFoundError:
            return f"the cgroup has no controller {setting.controller}, or the kernel no such file of it"
        except OSError as error:
            if error.errno == errno.EACCES and not os.path.exists(f"{directory}/{setting.file}"):
                return f"the cgroup has no controller {setting.controller}"
            return describe_os_error(error)
        return ""

    def _list_devices(self, group: Group, rules: tuple[GroupSetting, ...]) -> str:
        """The group may open the allowed devices only. The rule `a` of `devices.deny` needs no instruction."""
        directory = self._root + group.path
        devices = self._devices.setdefault(directory, DeviceList(directory))
        try:
            devices.allow(*(rule.value for rule in rules if rule.file == "devices.allow"))
        except OSError as error:
            return f"attach program: {describe_os_error(error)}"
        return ""

    def allowed(self, group: Group, name: str) -> str:
        for path in kernel.upwards(group.path.rpartition("/")[0]):
            if text := kernel.read(f"{self._root}{path}/cpuset.{name}.effective").strip():
                return text
        return ""

    def oom(self, group: Group) -> HostOom | None:
        if not kernel.keyed(f"{self._root}{group.path}/memory.events", "oom_kill"):
            return None
        for path in kernel.upwards(group.path):
            if kernel.keyed(f"{self._root}{path}/memory.events.local", "oom"):
                limit = kernel.number(f"{self._root}{path}/memory.max")
                return HostOom(limited_by=path or "/", limit_bytes=limit or 0)
        return HostOom(limited_by="", limit_bytes=0)


def _is_occupied(directory: str) -> bool:
    """True for a cgroup with processes of its own, except the root, which has no type.

    The kernel would enable cpu and cpuset there and make all cgroups below threaded, which then take no process.
    """
    return os.path.exists(f"{directory}/cgroup.type") and bool(kernel.members(directory))


def _enable(directory: str, wanted: tuple[str, ...], *, occupied: bool) -> Iterator[tuple[str, str]]:
    """Enables the wanted controllers for the cgroups below; yields those that fail, each with the reason."""
    there = kernel.read(f"{directory}/cgroup.controllers").split()
    enabled = kernel.read(f"{directory}/cgroup.subtree_control").split()
    for controller in wanted:
        if controller in enabled:
            continue
        if controller not in there:
            yield controller, "it is not there"
            continue
        if occupied:
            yield controller, "processes are in the cgroup itself"
            continue
        try:
            kernel.write(f"{directory}/cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            yield controller, describe_os_error(error)
