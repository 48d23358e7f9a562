"""One shim's `/metrics`: Kata's metrics of shim, VMM and virtiofsd, and pyshim's own."""

import os
import re
import socket
import struct
from collections.abc import Mapping

from pyshim import __version__
from pyshim.host.processes.identity import as_user_of
from pyshim.host.processes.stat import is_stopped, stat_fields
from pyshim.model.observation import BOUNDS_MS, AgentCalls, Duration, Observation, SizeFigures, Span
from pyshim.model.units import MIB
from pyshim.monitor.exposition import Family, Sample, gauge, gauges


def shim_families(
    *,
    calls: Mapping[str, Duration],
    agent_calls: AgentCalls,
    pod: Observation,
    pid: int,
) -> list[Family]:
    """`calls` are containerd's to this shim, whose process is `pid`; `agent_calls` are the shim's to the agent."""
    found = [
        durations_family("kata_shim_rpc_durations_histogram_milliseconds", "Time of containerd's calls.", calls),
        *process_families(pid, "kata_shim", "the shim"),
        *own_families("kata_shim"),
        durations_family(
            "kata_shim_agent_rpc_durations_histogram_milliseconds", "Time of calls to the agent.", agent_calls.all()
        ),
        *_answers(agent_calls),
        gauges(
            "pyshim_process_stopped",
            "1 when the process is stopped, by SIGSTOP or a debugger.",
            "process",
            {name: int(is_stopped(pid)) for name, pid in _helpers(pod).items()},
        ),
    ]
    if pod.vmm_pid:
        found += process_families(pod.vmm_pid, "kata_hypervisor", "the VMM")
        found.append(netdev_family(pod.vmm_pid, "kata_hypervisor_netdev"))
    if pod.virtiofsd_pid:
        found += process_families(pod.virtiofsd_pid, "kata_virtiofsd", "virtiofsd")
    return found + _own(pod)


def _answers(calls: AgentCalls) -> list[Family]:
    found = [
        gauges(
            "pyshim_agent_answer_seconds",
            "Time that the agent's latest answers to health checks and scrapes took.",
            "percentile",
            {str(each): seconds for each, seconds in calls.percentiles().items()},
        )
    ]
    age_s = calls.age_s()
    if age_s is not None:
        found.append(gauge("pyshim_agent_answer_age_seconds", "Time since the agent's last answer.", age_s))
    return found


def _helpers(pod: Observation) -> dict[str, int]:
    pids = {"vmm": pod.vmm_pid, "virtiofsd": pod.virtiofsd_pid}
    return {name: pid for name, pid in pids.items() if pid}


def _own(pod: Observation) -> list[Family]:
    return [
        gauges("pyshim_build_info", "1; the label is the shim's version.", "version", {__version__: 1}),
        _size("pyshim_vm_vcpus", "vCPUs of the VM.", pod.vcpus, 1),
        _size("pyshim_vm_memory_bytes", "Memory of the VM in bytes.", pod.memory_mib, MIB),
        gauges(
            "pyshim_start_phase_seconds",
            "Time of each step from Create to the first output, of the pod's first container.",
            "phase",
            phases(pod.spans),
        ),
        gauge("pyshim_vm_cloned", "1 when the guest continued from a template, 0 when it booted.", int(pod.is_cloned)),
        gauge("pyshim_containers", "Containers of the pod, the sandbox's included.", pod.containers),
        gauges("pyshim_ledger_entries", "Host resources that the sandbox holds.", "kind", pod.ledger),
        Family(
            "pyshim_stream_bytes_total",
            "counter",
            "Bytes of a container's processes that have reached their reader.",
            tuple(
                Sample({"container": name, "stream": stream}, moved) for (name, stream), moved in pod.streams.items()
            ),
        ),
        Family(
            "pyshim_oom_kills_total",
            "counter",
            "Out-of-memory kills in a container.",
            tuple(Sample({"container": name}, kills) for name, kills in pod.oom_kills.items()),
        ),
        Family(
            "pyshim_health_checks_missed_total",
            "counter",
            "Health checks that the agent did not pass; after three in a row the sandbox ends.",
            (Sample({}, pod.missed_checks),),
        ),
    ]


def guest_family(is_whole: bool) -> Family:
    return gauge(
        "pyshim_guest_metrics_whole", "1 when the guest's metrics are all here, 0 when some are missing.", int(is_whole)
    )


def durations_family(name: str, help_text: str, calls: Mapping[str, Duration], *, in_seconds: bool = False) -> Family:
    """A histogram with Kata's buckets, one for each action, in ms or seconds; an action "" has no label."""
    unit_ms = 1000 if in_seconds else 1
    bounds = (*(f"{bound / unit_ms:g}" for bound in BOUNDS_MS), "+Inf")
    samples: list[Sample] = []
    for action, took in calls.items():
        labels = {"action": action} if action else {}
        total = 0
        for bound, count in zip(bounds, took.counts, strict=True):
            total += count
            samples.append(Sample({**labels, "le": bound}, total, "_bucket"))
        samples += [Sample(labels, took.sum_ms / unit_ms, "_sum"), Sample(labels, total, "_count")]
    return Family(name, "histogram", help_text, tuple(samples))


def phases(spans: tuple[Span, ...]) -> dict[str, float]:
    """Seconds by step, without the id in its name: the first step of each name that has ended."""
    found: dict[str, float] = {}
    for span in spans:
        if span.end_ns:
            name = span.name.partition(" ")[0] if span.parent < 0 else span.name
            found.setdefault(name, max(span.end_ns - span.start_ns, 0) / 1e9)
    return found


def _size(name: str, help_text: str, size: SizeFigures, unit: int) -> Family:
    return gauges(
        name,
        help_text,
        "size",
        {
            "requested": size.requested * unit,
            "booted": size.booted * unit,
            "current": size.current * unit,
            "limit": size.limit * unit,
        },
    )


_STATUS_ITEMS = (
    *("vmpeak", "vmsize", "vmlck", "vmpin", "vmhwm", "vmrss", "rssanon", "rssfile", "rssshmem", "vmdata", "vmstk"),
    *("vmexe", "vmlib", "vmpte", "vmpmd", "vmswap", "hugetlbpages", "voluntary_ctxt_switches"),
    "nonvoluntary_ctxt_switches",
)
_IO_ITEMS = ("rchar", "wchar", "syscr", "syscw", "readbytes", "writebytes", "cancelledwritebytes")
_STAT_ITEMS = ("utime", "stime", "cutime", "cstime")
_RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
_SENT = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")
_NETDEV_ITEMS = (*(f"recv_{item}" for item in _RECEIVED), *(f"sent_{item}" for item in _SENT))
"""The columns of /proc/net/dev."""
_OPEN_FILES = re.compile(r"Max open files +([0-9]+|unlimited)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_families(pid: int, prefix: str, what: str) -> list[Family]:
    """Empty if the process has ended. `what` names it in the descriptions."""
    place = f"/proc/{pid}"
    try:
        stat = stat_fields(pid)
        status = {key.lower(): _bytes(value) for key, value in _pairs(f"{place}/status")}
        pairs, fds = as_user_of(pid, lambda: (_pairs(f"{place}/io"), len(os.listdir(f"{place}/fd"))))
    except (OSError, IndexError, ValueError):
        return []
    io = {key.replace("_", ""): _bytes(value) for key, value in pairs}
    return [
        gauge(f"{prefix}_threads", f"Threads of {what}.", int(stat[17])),
        gauges(f"{prefix}_proc_status", f"Status of {what}, sizes in bytes.", "item", _chosen(status, _STATUS_ITEMS)),
        gauges(
            f"{prefix}_proc_stat",
            f"CPU time of {what} in clock ticks.",
            "item",
            {item: int(ticks) for item, ticks in zip(_STAT_ITEMS, stat[11:15], strict=True)},
        ),
        gauges(f"{prefix}_io_stat", f"Input and output of {what}.", "item", _chosen(io, _IO_ITEMS)),
        gauge(f"{prefix}_fds", f"Open file descriptors of {what}.", fds),
    ]


def own_families(prefix: str) -> list[Family]:
    """The metrics `<prefix>_process_*`, which Prometheus' client libraries have of their own process."""
    try:
        stat = stat_fields("self")
        fds = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/limits", encoding="utf-8") as file:
            limit = _OPEN_FILES.search(file.read())
        started_s = _boot_time_s() + int(stat[19]) / _TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return []
    cpu_s = (int(stat[11]) + int(stat[12])) / _TICKS_PER_S
    max_fds = float(limit[1]) if limit and limit[1] != "unlimited" else -1
    name = f"{prefix}_process"
    return [
        Family(f"{name}_cpu_seconds_total", "counter", "CPU time in seconds.", (Sample({}, cpu_s),)),
        gauge(f"{name}_open_fds", "Open file descriptors.", fds),
        gauge(f"{name}_max_fds", "Most file descriptors that may be open; -1 for no limit.", max_fds),
        gauge(f"{name}_resident_memory_bytes", "Resident memory in bytes.", int(stat[21]) * _PAGE_BYTES),
        gauge(f"{name}_virtual_memory_bytes", "Virtual memory in bytes.", int(stat[20])),
        gauge(f"{name}_start_time_seconds", "When the process started, in seconds since the epoch.", started_s),
    ]


def listener_is_stopped(path: str) -> bool:
    """The process that listens at the socket is stopped (SIGSTOP). False if this process cannot see it."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
            pid, _uid, _gid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:  # it has more callers than it takes, for instance
            return False
    return is_stopped(pid)


def netdev_family(pid: int, name: str) -> Family:
    """The network interfaces of the process's network namespace."""
    samples: list[Sample] = []
    try:
        lines = _lines(f"/proc/{pid}/net/dev")
    except OSError:
        lines = []
    for line in lines:
        interface, separator, rest = line.partition(":")
        if separator:
            labels = interface.strip()
            samples += [
                Sample({"interface": labels, "item": item}, int(value))
                for item, value in zip(_NETDEV_ITEMS, rest.split(), strict=False)
            ]
    return Family(name, "gauge", "Counters of the network interfaces of the pod on the host.", tuple(samples))


def _boot_time_s() -> int:
    return next(int(line.split()[1]) for line in _lines("/proc/stat") if line.startswith("btime "))


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


def _pairs(path: str) -> list[tuple[str, str]]:
    return [(key, value) for key, separator, value in (line.partition(":") for line in _lines(path)) if separator]


def _bytes(text: str) -> int:
    """The number at the beginning, in bytes; 0 without a number."""
    words = text.split()
    if not words or not words[0].isdecimal():
        return 0
    return int(words[0]) * (1024 if words[1:] == ["kB"] else 1)


def _chosen(found: Mapping[str, int], items: tuple[str, ...]) -> dict[str, float]:
    return {item: found.get(item, 0) for item in items}
