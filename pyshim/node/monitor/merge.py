"""All sandboxes' metrics as one text, in which a guest can change nothing but its own sandbox's part.

A family has one type in the whole text, so no source may choose it: `kind_of` does, by name. A sandbox that declares
another type, and a guest that uses an unknown name, lose that family, and no other sandbox does.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pyshim.monitor.exposition import GUEST_PREFIXES, TextFamily, labels_text

MAX_SERIES = 10_000
"""Series of one guest over the life of its sandbox: Prometheus remembers each for hours. kata-agent has about 1,000."""
_AGENT = ("io_stat", "proc_stat", "proc_status", "threads", "total_rss", "total_time", "total_vm")
_AGENT_PROCESS = ("max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds", "threads")
_GUEST = (
    *("cpu_time", "diskstat", "filesystem_bytes", "filesystem_inodes", "load", "meminfo", "netdev_stat", "tasks"),
    "vm_stat",
)
_KINDS = {
    **{f"kata_agent_{name}": "gauge" for name in _AGENT},
    **{f"kata_agent_process_{name}": "gauge" for name in (*_AGENT_PROCESS, "virtual_memory_bytes")},
    "kata_agent_process_virtual_memory_max_bytes": "gauge",
    "kata_agent_process_cpu_seconds_total": "counter",
    "kata_agent_scrape_count": "counter",
    **{f"kata_guest_{name}": "gauge" for name in _GUEST},
    "kata_shim_rpc_durations_histogram_milliseconds": "histogram",
    "kata_shim_agent_rpc_durations_histogram_milliseconds": "histogram",
    "kata_shim_go_gc_duration_seconds": "summary",
}
"""Source: Kata's src/agent/src/metrics.rs and docs/design/kata-2-0-metrics.md, and the process metrics of Prometheus'
Rust and Go libraries."""


_SIMPLE = ("gauge", "counter")
"""Types that a sandbox need not declare."""


class SandboxMetrics(NamedTuple):
    """The metrics of one sandbox."""

    sandbox_id: str
    labels: Mapping[str, str]
    """Added to each of its samples."""
    families: Mapping[str, TextFamily]


def kind_of(name: str) -> str:
    """The type that a family has in every text; empty for an unknown one of a guest.

    A shim's family that is not listed has its type by Prometheus' rule for names: another version of a shim has others.
    """
    if name in _KINDS:
        return _KINDS[name]
    if name.startswith(GUEST_PREFIXES):
        return ""
    return "counter" if name.endswith("_total") else "gauge"


class Merge:
    """Has the series of each guest, by their hashes, from scrape to scrape."""

    def __init__(self) -> None:
        self._series: dict[str, set[int]] = {}

    def text(self, sources: Iterable[SandboxMetrics]) -> str:
        """The families of all sources. The series of sandboxes that are not among them are forgotten."""
        former, self._series = self._series, {}
        heads: dict[str, list[str]] = {}
        lines: dict[str, list[str]] = {}
        for source in sources:
            series = self._series[source.sandbox_id] = former.get(source.sandbox_id, set())
            labels = labels_text(source.labels)
            for name, family in source.families.items():
                kind = kind_of(name)
                if family.kind != kind and (family.kind != "untyped" or kind not in _SIMPLE):
                    continue
                if name.startswith(GUEST_PREFIXES):
                    _limit(family, series)
                if family.samples:
                    heads.setdefault(name, _head(family, kind))
                    lines.setdefault(name, []).extend(family.lines(labels))
        text = [line for name, found in lines.items() for line in (*heads[name], *found)]
        return "".join(f"{line}\n" for line in text)


def _limit(family: TextFamily, series: set[int]) -> None:
    """The family has its known series, and new ones up to the limit."""
    # Python keys its hashes by a random secret, so a guest cannot choose series with equal hashes.
    for key in list(family.samples):
        fingerprint = hash(key)
        if fingerprint in series:
            continue
        if len(series) < MAX_SERIES:
            series.add(fingerprint)
        else:
            del family.samples[key]


def _head(family: TextFamily, kind: str) -> list[str]:
    """A description from a guest would stand above all other sandboxes' samples, so it is left out."""
    is_guest = family.name.startswith(GUEST_PREFIXES)
    help_lines = [f"# HELP {family.name} {family.help}"] if family.help and not is_guest else []
    return [*help_lines, f"# TYPE {family.name} {kind}"]
