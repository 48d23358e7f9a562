"""Metrics of one process, under Kata's names: `kata_shim_*`, `kata_hypervisor_*`, `kata_virtiofsd_*`.

Read from /proc: Kata's items are the kernel's own lines, most of which psutil does not have. Kata gives sizes in
bytes and times in clock ticks.
"""

import os
import re
import socket
import struct
from collections.abc import Mapping

from pyshim.host.processes.stat import is_stopped, stat_fields
from pyshim.monitor.exposition import Family, Sample, gauge, gauges

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
        io = {key.replace("_", ""): _bytes(value) for key, value in _pairs(f"{place}/io")}
        fds = len(os.listdir(f"{place}/fd"))
    except (OSError, IndexError, ValueError):
        return []
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
