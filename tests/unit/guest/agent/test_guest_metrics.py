"""The guest's own numbers have kata-agent's names and units."""

import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from guest.agent.calls import stats

MEMORY_ITEMS = {
    "MemTotal": "mem_total",
    "MemFree": "mem_free",
    "MemAvailable": "mem_available",
    "Buffers": "buffers",
    "SwapCached": "swap_cached",
    "Active(anon)": "active_anon",
    "Inactive(file)": "inactive_file",
    "HighTotal": "high_total",
    "AnonPages": "anon_pages",
    "SReclaimable": "s_reclaimable",
    "SUnreclaim": "s_unreclaim",
    "KReclaimable": "k_reclaimable",
    "KernelStack": "kernel_stack",
    "NFS_Unstable": "nfs_unstable",
    "WritebackTmp": "writeback_tmp",
    "Committed_AS": "committed_as",
    "VmallocUsed": "vmalloc_used",
    "HardwareCorrupted": "hardware_corrupted",
    "AnonHugePages": "anon_hugepages",
    "ShmemHugePages": "shmem_hugepages",
    "ShmemPmdMapped": "shmem_pmd_mapped",
    "CmaTotal": "cma_total",
    "HugePages_Total": "hugepages_total",
    "HugePages_Surp": "hugepages_surp",
    "Hugepagesize": "hugepagesize",
    "Hugetlb": "hugetlb",
    "Percpu": "per_cpu",
    "DirectMap4k": "direct_map_4k",
    "DirectMap2M": "direct_map_2M",
    "DirectMap1G": "direct_map_1G",
}
"""Lines of /proc/meminfo and the items kata-agent makes of them (its src/agent/src/metrics.rs)."""


@pytest.mark.parametrize(("key", "item"), MEMORY_ITEMS.items())
def test_a_line_of_meminfo_has_kata_agents_name(key: str, item: str) -> None:
    assert stats.memory_item(key) == item


def samples(name: str) -> dict[tuple[str, ...], float]:
    (family,) = (each for each in text_string_to_metric_families(stats.text()) if each.name == name)
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_cpu_time_is_in_milliseconds() -> None:
    """Between two looks at the kernel's own figure, which is in ticks."""

    def idle_ms() -> float:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        return int(first.split()[4]) * 1000 / os.sysconf("SC_CLK_TCK")

    before = idle_ms()
    told = samples("kata_guest_cpu_time")["total", "idle"]

    assert before <= told <= idle_ms()


def test_memory_is_in_bytes_under_names_that_differ() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = samples("kata_guest_meminfo")

    assert len(told) == len(lines)
    (total,) = (int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    assert told["mem_total",] == total * 1024
