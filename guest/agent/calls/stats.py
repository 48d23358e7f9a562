"""Numbers and events: statistics of containers, events of the OOM killer, and metrics.

Metrics are those of the guest and the agent as Prometheus text, under kata-agent's names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

from protos.agent import agent_pb2 as pb

from guest.agent.container.cgroup import OomEvents
from guest.agent.container.container import Containers
from guest.agent.files import read_text


class StatsCalls:
    def __init__(self, *, containers: Containers, oom_events: OomEvents) -> None:
        self._containers = containers
        self._oom_events = oom_events

    def container(self, request: pb.StatsContainerRequest) -> pb.StatsContainerResponse:
        """What the container uses. The network is the pod's: no container has counters of its own."""
        found = self._containers.find(request.container_id)
        reply = pb.StatsContainerResponse()
        if found.cgroup:
            reply.cgroup_stats.CopyFrom(found.cgroup_stats.read())
        return reply

    def all_containers(self, request: pb.StatsContainersRequest) -> pb.StatsContainersResponse:
        """Of each container as `container` answers, in one reply."""
        reply = pb.StatsContainersResponse()
        for each in self._containers:
            if each.cgroup:
                reply.containers[each.cid].CopyFrom(each.cgroup_stats.read())
        return reply

    async def oom_event(self, request: pb.GetOOMEventRequest) -> pb.OOMEvent:
        """The next container that lost a process to the OOM killer; waits for one."""
        return pb.OOMEvent(container_id=await self._oom_events.next())

    async def metrics(self, request: pb.GetMetricsRequest) -> pb.Metrics:
        return pb.Metrics(metrics=text())


# -- metrics -----------------------------------------------------------------------------------------------------------

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATUS_KEYS = ("vm", "rss", "hugetlb", "voluntary", "nonvoluntary")
"""Lines of /proc/PID/status that kata-agent reports."""
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where words of a name in /proc/meminfo meet: SwapFree, SReclaimable."""


Samples: TypeAlias = list[tuple[str, object]]
"""Labels and value of each sample."""
Families: TypeAlias = Iterator[tuple[str, str, Samples]]
"""Name and description of each gauge, and its samples."""


def text() -> str:
    """The present metrics. A source that cannot be read is left out."""
    lines: list[str] = []
    for collect in (_agent, _load, _cpu_time, _memory, _vm_stat, _network, _disks):
        with suppress(OSError, ValueError, IndexError):
            for name, description, samples in collect():
                lines += [f"# HELP {name} {description}", f"# TYPE {name} gauge"]
                lines += [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _lines(path: str) -> list[str]:
    return read_text(path).splitlines()


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _items(pairs: Iterable[tuple[str, object]]) -> Samples:
    return [(f'item="{_escaped(item)}"', value) for item, value in pairs]


def _agent() -> Families:
    stat = _lines("/proc/self/stat")[0].rpartition(")")[2].split()
    rss_bytes = int(stat[21]) * _PAGE_BYTES
    yield "kata_agent_threads", "Threads of the agent.", [("", stat[17])]
    yield "kata_agent_total_time", "CPU time of the agent in seconds.", [("", _seconds(stat[11], stat[12]))]
    yield "kata_agent_total_vm", "Virtual memory of the agent in bytes.", [("", stat[20])]
    yield "kata_agent_total_rss", "Resident memory of the agent in bytes.", [("", rss_bytes)]
    times = zip(("utime", "stime", "cutime", "cstime"), stat[11:15], strict=True)
    yield "kata_agent_proc_stat", "CPU time of the agent in clock ticks.", _items(times)
    status = [line.partition(":")[::2] for line in _lines("/proc/self/status")]
    sizes = [(key.lower(), value.split()) for key, value in status]
    reported = [
        (key, int(words[0]) * (1024 if words[1:] == ["kB"] else 1))
        for key, words in sizes
        if words and words[0].isdecimal() and key.startswith(_STATUS_KEYS)
    ]
    yield "kata_agent_proc_status", "Status of the agent, sizes in bytes.", _items(reported)
    open_fds = len(os.listdir("/proc/self/fd"))
    yield "kata_agent_process_open_fds", "Open file descriptors of the agent.", [("", open_fds)]
    yield "kata_agent_process_resident_memory_bytes", "Resident memory of the agent in bytes.", [("", rss_bytes)]
    counters = [line.partition(":")[::2] for line in _lines("/proc/self/io")]
    yield "kata_agent_io_stat", "I/O of the agent.", _items((key, value.strip()) for key, value in counters)


def _seconds(*ticks: str) -> float:
    return sum(int(value) for value in ticks) / _CLOCK_TICKS


def _load() -> Families:
    fields = _lines("/proc/loadavg")[0].split()
    loads = zip(("load1", "load5", "load15"), fields, strict=False)
    yield "kata_guest_load", "Load averages of the guest.", _items(loads)
    running, _, total = fields[3].partition("/")
    yield "kata_guest_tasks", "Tasks of the guest.", _items((("cur", running), ("max", total)))


def _cpu_time() -> Families:
    kinds = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    samples: Samples = []
    for line in _lines("/proc/stat"):
        name, *values = line.split()
        if name.startswith("cpu"):
            cpu = name[3:] or "total"
            samples += [
                (f'cpu="{cpu}",item="{kind}"', round(_seconds(value) * 1000))
                for kind, value in zip(kinds, values, strict=False)
            ]
    yield "kata_guest_cpu_time", "CPU time of the guest in milliseconds.", samples


def _memory() -> Families:
    sizes: Samples = []
    for line in _lines("/proc/meminfo"):
        key, _, rest = line.partition(":")
        value, *unit = rest.split()
        sizes.append((memory_item(key), int(value) * (1024 if unit == ["kB"] else 1)))
    yield "kata_guest_meminfo", "Memory of the guest, sizes in bytes.", _items(sizes)


def memory_item(key: str) -> str:
    """kata-agent's name for a line of /proc/meminfo, which is that of Rust's crate procfs."""
    if key.startswith("DirectMap"):
        return f"direct_map_{key.removeprefix('DirectMap')}"  # the unit stays as it is: 4k, 2M, 1G
    whole = key.replace("HugePages", "Hugepages").replace("Percpu", "PerCpu").replace("(", "_").rstrip(")")
    return _WORDS.sub("_", whole).lower()


def _vm_stat() -> Families:
    pairs = [line.partition(" ")[::2] for line in _lines("/proc/vmstat")]
    yield "kata_guest_vm_stat", "Virtual memory events of the guest.", _items(pairs)


def interface_counters() -> dict[str, list[int]]:
    """By interface: eight counters of receiving, then eight of sending. Source: proc(5), net/dev."""
    pairs = (line.partition(":") for line in _lines("/proc/self/net/dev"))
    return {name.strip(): list(map(int, rest.split())) for name, colon, rest in pairs if colon}


def _network() -> Families:
    receive = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
    transmit = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")
    items = [f"recv_{key}" for key in receive] + [f"sent_{key}" for key in transmit]
    samples: Samples = []
    for name, counters in interface_counters().items():
        interface = _escaped(name)
        samples += [(f'interface="{interface}",item="{k}"', v) for k, v in zip(items, counters, strict=True)]
    yield "kata_guest_netdev_stat", "Counters of the guest's interfaces.", samples


def _disks() -> Families:
    items = (
        "reads", "merged", "sectors_read", "time_reading", "writes", "writes_merged", "sectors_written", "time_writing",
        "in_progress", "time_in_progress", "weighted_time_in_progress",
        "discards", "discards_merged", "sectors_discarded", "time_discarding", "flushes", "time_flushing",
    )  # fmt: skip
    samples: Samples = []
    for line in _lines("/proc/diskstats"):
        _major, _minor, disk, *values = line.split()
        samples += [(f'disk="{_escaped(disk)}",item="{k}"', v) for k, v in zip(items, values, strict=False)]
    yield "kata_guest_diskstat", "Counters of the guest's disks.", samples
