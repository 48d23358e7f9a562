"""The members and the usage of our cgroups, read from the kernel for an operator."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from pyshim.resources.cgroups.host import hierarchies as kernel

_V1_USAGE = (
    ("cpu_ns", "cpuacct", "cpuacct.usage"),
    ("memory_bytes", "memory", "memory.usage_in_bytes"),
    ("memory_peak_bytes", "memory", "memory.max_usage_in_bytes"),
    ("processes", "pids", "pids.current"),
)
_V2_USAGE = (
    ("memory_bytes", "memory", "memory.current"),
    ("memory_peak_bytes", "memory", "memory.peak"),
    ("processes", "pids", "pids.current"),
)


def usage(path: str) -> Mapping[str, int]:
    """CPU time, memory, number of tasks, throttled periods and OOM kills, as far as the kernel has them."""
    found: dict[str, int] = {}
    for each in kernel.mounted():
        directory = each.mount_point + path
        if not os.path.isdir(directory):
            continue
        for name, controller, file in _V1_USAGE if each.controllers else _V2_USAGE:
            value = kernel.number(f"{directory}/{file}")
            if value is not None and (not each.controllers or controller in each.controllers):
                found[name] = value
        if not each.controllers and os.path.exists(f"{directory}/cpu.stat"):
            found.setdefault("cpu_ns", kernel.keyed(f"{directory}/cpu.stat", "usage_usec") * 1000)
        for name, file, key in (
            ("throttled_periods", "cpu.stat", "nr_throttled"),
            ("oom_kills", "memory.oom_control", "oom_kill"),
            ("oom_kills", "memory.events", "oom_kill"),
        ):
            if kernel.read(f"{directory}/{file}"):
                found[name] = found.get(name, 0) + kernel.keyed(f"{directory}/{file}", key)
    return found


def is_there(path: str, roots: tuple[str, ...]) -> bool:
    return any(os.path.isdir(root + path) for root in roots)


def processes(path: str, roots: tuple[str, ...]) -> tuple[int, ...]:
    """The processes of the cgroup, from the first hierarchy that has some: they are the same in all."""
    for root in roots:
        if found := kernel.members(root + path):
            return found
    return ()


def name_of(pid: int) -> str:
    """The process's name in the kernel; empty if it has ended."""
    return kernel.read(f"/proc/{pid}/comm").strip()


def threads_of(pid: int) -> Mapping[int, str]:
    """Name by thread id."""
    with suppress(OSError):
        return {
            int(tid): kernel.read(f"/proc/{pid}/task/{tid}/comm").strip() for tid in os.listdir(f"/proc/{pid}/task")
        }
    return {}


def cgroup_of_thread(pid: int, tid: int) -> str:
    """The cgroup that counts a thread's CPU time; empty if the thread has ended."""
    place = f"{pid}/task/{tid}"
    for each in kernel.mounted():
        if "cpu" in each.controllers or "cpuacct" in each.controllers:
            return kernel.place_of(place, each.controllers)
    return kernel.place_of(place, ())


def vhost_workers(pid: int) -> Iterator[int]:
    """The kernel's threads that move packets for this VMM; newer kernels have them among its own threads."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and name_of(int(entry)) == f"vhost-{pid}":
            yield int(entry)
