"""Reads a cgroup v2 directory as the API's statistics. A missing file counts as zero.

Sources: kernel Documentation/admin-guide/cgroup-v2.rst; each field of the API has its meaning in containerd's
cgroup v1 metrics.
"""

from __future__ import annotations

from protos.agent import agent_pb2 as pb

from guest.agent.files import names_in, read_text

_NO_LIMIT = (1 << 64) - 1


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def number(path: str) -> int:
    """The file's one number; `max` is 2^64-1."""
    text = _read(path).strip()
    return _NO_LIMIT if text == "max" else int(text) if text.isdigit() else 0


def flat_keyed(path: str) -> dict[str, int]:
    """The file's `key value` lines."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def cgroup_stats(folder: str) -> pb.CgroupStats:
    """CgroupStats of the cgroup at `folder`."""
    return pb.CgroupStats(
        cpu_stats=_cpu(folder),
        memory_stats=_memory(folder),
        pids_stats=pb.PidsStats(current=number(f"{folder}/pids.current"), limit=_limit(number(f"{folder}/pids.max"))),
        blkio_stats=_block_io(folder),
        hugetlb_stats=_hugetlb(folder),
    )


def _limit(value: int) -> int:
    return 0 if value == _NO_LIMIT else value


def _cpu(folder: str) -> pb.CpuStats:
    stat = flat_keyed(f"{folder}/cpu.stat")
    return pb.CpuStats(
        cpu_usage=pb.CpuUsage(
            total_usage=stat.get("usage_usec", 0) * 1000,
            usage_in_kernelmode=stat.get("system_usec", 0) * 1000,
            usage_in_usermode=stat.get("user_usec", 0) * 1000,
        ),
        throttling_data=pb.ThrottlingData(
            periods=stat.get("nr_periods", 0),
            throttled_periods=stat.get("nr_throttled", 0),
            throttled_time=stat.get("throttled_usec", 0) * 1000,
        ),
    )


def _memory(folder: str) -> pb.MemoryStats:
    stat = flat_keyed(f"{folder}/memory.stat")
    events = flat_keyed(f"{folder}/memory.events")
    usage = number(f"{folder}/memory.current")
    limit = number(f"{folder}/memory.max")
    swap = number(f"{folder}/memory.swap.current")
    swap_limit = number(f"{folder}/memory.swap.max")
    return pb.MemoryStats(
        cache=stat.get("file", 0),
        usage=pb.MemoryData(
            usage=usage,
            max_usage=number(f"{folder}/memory.peak"),
            failcnt=events.get("max", 0),
            limit=limit,
        ),
        # v1 readers expect memory and swap together here.
        swap_usage=pb.MemoryData(
            usage=usage + swap, limit=min(limit + swap_limit, _NO_LIMIT), failcnt=events.get("max", 0)
        ),
        use_hierarchy=True,
        stats=stat,
    )


_IO_KEYS = (
    ("io_service_bytes_recursive", "rbytes", "Read"),
    ("io_service_bytes_recursive", "wbytes", "Write"),
    ("io_serviced_recursive", "rios", "Read"),
    ("io_serviced_recursive", "wios", "Write"),
)


def _block_io(folder: str) -> pb.BlkioStats:
    stats = pb.BlkioStats()
    for line in _read(f"{folder}/io.stat").splitlines():
        device, _, rest = line.partition(" ")
        major, _, minor = device.partition(":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        values = dict(word.partition("=")[::2] for word in rest.split())
        for field, key, operation in _IO_KEYS:
            value = values.get(key, "")
            if value.isdigit():
                entry = pb.BlkioStatsEntry(major=int(major), minor=int(minor), op=operation, value=int(value))
                getattr(stats, field).append(entry)
    return stats


def _hugetlb(folder: str) -> dict[str, pb.HugetlbStats]:
    stats = {}
    for name in names_in(folder):
        if name.startswith("hugetlb.") and name.endswith(".current") and ".rsvd." not in name:
            size = name[len("hugetlb.") : -len(".current")]
            events = flat_keyed(f"{folder}/hugetlb.{size}.events")
            stats[size] = pb.HugetlbStats(usage=number(f"{folder}/{name}"), failcnt=events.get("max", 0))
    return stats
