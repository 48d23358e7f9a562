"""The guest's and the agent's own numbers in Prometheus text form, under kata-agent's names."""

from __future__ import annotations

import os
import re

from guest.agent.files import read_text

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATUS_KEYS = ("vm", "rss", "hugetlb", "voluntary", "nonvoluntary")
"""Lines of /proc/PID/status that kata-agent reports."""
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Names of /proc/meminfo that are spelled otherwise: SwapFree, SReclaimable."""


def text() -> str:
    """Metrics of this moment. A source that cannot be read is left out."""
    lines: list[str] = []
    for collect in (_agent, _load, _cpu_time, _memory, _vm_stat, _network, _disks):
        try:
            collect(lines)
        except (OSError, ValueError, IndexError):
            continue
    return "\n".join(lines) + "\n"


def _lines(path: str) -> list[str]:
    return read_text(path).splitlines()


def _gauge(lines: list[str], name: str, help_text: str, samples: list[tuple[str, object]]) -> None:
    lines.append(f"# HELP {name} {help_text}")
    lines.append(f"# TYPE {name} gauge")
    lines.extend(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples)


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _agent(lines: list[str]) -> None:
    stat = _lines("/proc/self/stat")[0].rpartition(")")[2].split()
    _gauge(lines, "kata_agent_threads", "Threads of the agent.", [("", stat[17])])
    _gauge(lines, "kata_agent_total_time", "CPU time of the agent in seconds.", [("", _seconds(stat[11], stat[12]))])
    _gauge(lines, "kata_agent_total_vm", "Virtual memory of the agent in bytes.", [("", stat[20])])
    _gauge(lines, "kata_agent_total_rss", "Resident memory of the agent in bytes.", [("", int(stat[21]) * _PAGE_BYTES)])
    times = zip(("utime", "stime", "cutime", "cstime"), stat[11:15], strict=True)
    _gauge(
        lines,
        "kata_agent_proc_stat",
        "CPU time of the agent in clock ticks.",
        [(f'item="{item}"', ticks) for item, ticks in times],
    )
    status = [line.partition(":")[::2] for line in _lines("/proc/self/status")]
    sizes = [(key.lower(), value.split()) for key, value in status]
    _gauge(
        lines,
        "kata_agent_proc_status",
        "Status of the agent, sizes in bytes.",
        [
            (f'item="{key}"', int(words[0]) * (1024 if words[1:] == ["kB"] else 1))
            for key, words in sizes
            if words and words[0].isdecimal() and key.startswith(_STATUS_KEYS)
        ],
    )
    open_fds = len(os.listdir("/proc/self/fd"))
    _gauge(lines, "kata_agent_process_open_fds", "Open file descriptors of the agent.", [("", open_fds)])
    _gauge(
        lines,
        "kata_agent_process_resident_memory_bytes",
        "Resident memory of the agent in bytes.",
        [("", int(stat[21]) * _PAGE_BYTES)],
    )
    pairs = [line.partition(":")[::2] for line in _lines("/proc/self/io")]
    _gauge(lines, "kata_agent_io_stat", "I/O of the agent.", [(f'item="{key}"', value.strip()) for key, value in pairs])


def _seconds(*ticks: str) -> float:
    return sum(int(value) for value in ticks) / _CLOCK_TICKS


def _load(lines: list[str]) -> None:
    fields = _lines("/proc/loadavg")[0].split()
    samples: list[tuple[str, object]] = [(f'item="load{n}"', fields[i]) for i, n in enumerate((1, 5, 15))]
    _gauge(lines, "kata_guest_load", "Load averages of the guest.", samples)
    running, _, total = fields[3].partition("/")
    _gauge(lines, "kata_guest_tasks", "Tasks of the guest.", [('item="cur"', running), ('item="max"', total)])


def _cpu_time(lines: list[str]) -> None:
    kinds = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    samples: list[tuple[str, object]] = []
    for line in _lines("/proc/stat"):
        name, *values = line.split()
        if name.startswith("cpu"):
            cpu = name[3:] or "total"
            samples += [
                (f'cpu="{cpu}",item="{kind}"', round(_seconds(value) * 1000))
                for kind, value in zip(kinds, values, strict=False)
            ]
    _gauge(lines, "kata_guest_cpu_time", "CPU time of the guest in milliseconds.", samples)


def _memory(lines: list[str]) -> None:
    samples: list[tuple[str, object]] = []
    for line in _lines("/proc/meminfo"):
        key, _, rest = line.partition(":")
        value, *unit = rest.split()
        samples.append((f'item="{_escaped(memory_item(key))}"', int(value) * (1024 if unit == ["kB"] else 1)))
    _gauge(lines, "kata_guest_meminfo", "Memory of the guest, sizes in bytes.", samples)


def memory_item(key: str) -> str:
    """kata-agent's name for a line of /proc/meminfo: those of Rust's crate procfs."""
    if key.startswith("DirectMap"):
        return f"direct_map_{key.removeprefix('DirectMap')}"  # the unit stays as it is: 4k, 2M, 1G
    whole = key.replace("HugePages", "Hugepages").replace("Percpu", "PerCpu").replace("(", "_").rstrip(")")
    return _WORDS.sub("_", whole).lower()


def _vm_stat(lines: list[str]) -> None:
    pairs = [line.split() for line in _lines("/proc/vmstat")]
    _gauge(lines, "kata_guest_vm_stat", "Virtual memory events of the guest.", [(f'item="{k}"', v) for k, v in pairs])


def _network(lines: list[str]) -> None:
    receive = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
    transmit = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")
    items = [f"recv_{key}" for key in receive] + [f"sent_{key}" for key in transmit]
    samples: list[tuple[str, object]] = []
    for line in _lines("/proc/self/net/dev"):
        name, separator, rest = line.partition(":")
        if separator:
            interface = _escaped(name.strip())
            samples += [(f'interface="{interface}",item="{k}"', v) for k, v in zip(items, rest.split(), strict=True)]
    _gauge(lines, "kata_guest_netdev_stat", "Counters of the guest's interfaces.", samples)


def _disks(lines: list[str]) -> None:
    items = (
        "reads", "merged", "sectors_read", "time_reading", "writes", "writes_merged", "sectors_written", "time_writing",
        "in_progress", "time_in_progress", "weighted_time_in_progress",
        "discards", "discards_merged", "sectors_discarded", "time_discarding", "flushes", "time_flushing",
    )  # fmt: skip
    samples: list[tuple[str, object]] = []
    for line in _lines("/proc/diskstats"):
        _major, _minor, disk, *values = line.split()
        samples += [(f'disk="{_escaped(disk)}",item="{k}"', v) for k, v in zip(items, values, strict=False)]
    _gauge(lines, "kata_guest_diskstat", "Counters of the guest's disks.", samples)
