"""Numbers of a cgroup, as the guest agent reads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from guest.agent.container import cgroup


def test_cgroup_files_become_the_apis_statistics(tmp_path: Path) -> None:
    contents = {
        "cpu.stat": "usage_usec 1000\nuser_usec 700\nsystem_usec 300\nnr_periods 5\nthrottled_usec 40\n",
        "memory.current": "4096\n",
        "memory.max": "max\n",
        "memory.peak": "8192\n",
        "memory.stat": "anon 10\nfile 20\n",
        "memory.events": "low 0\nmax 3\noom_kill 1\n",
        "pids.current": "1\n",
        "pids.max": "max\n",
        "io.stat": "8:0 rbytes=100 wbytes=200 rios=3 wios=4 dbytes=0\nnonsense\n",
        "hugetlb.2MB.current": "2097152\n",
        "hugetlb.2MB.events": "max 1\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)

    stats = cgroup.CgroupStats(str(tmp_path)).read()

    assert stats.cpu_stats.cpu_usage.total_usage == 1_000_000
    assert stats.cpu_stats.throttling_data.throttled_time == 40_000
    assert (stats.memory_stats.usage.usage, stats.memory_stats.usage.max_usage) == (4096, 8192)
    assert stats.memory_stats.usage.limit == 2**64 - 1
    assert stats.memory_stats.stats == {"anon": 10, "file": 20}
    assert (stats.pids_stats.current, stats.pids_stats.limit) == (1, 0)
    entries = [(one.major, one.op, one.value) for one in stats.blkio_stats.io_service_bytes_recursive]
    assert entries == [(8, "Read", 100), (8, "Write", 200)]
    assert stats.hugetlb_stats["2MB"].usage == 2097152


def test_each_answer_has_the_present_numbers_and_none_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "pids.current").write_text("1\n")
    (tmp_path / "io.stat").write_text("8:0 rbytes=100\n")
    stats = cgroup.CgroupStats(str(tmp_path))
    assert len(stats.read().blkio_stats.io_service_bytes_recursive) == 1
    assert len(stats.read().blkio_stats.io_service_bytes_recursive) == 1

    (tmp_path / "pids.current").write_text("2\n")
    (tmp_path / "io.stat").write_text("")
    changed = stats.read()
    assert (changed.pids_stats.current, len(changed.blkio_stats.io_service_bytes_recursive)) == (2, 0)

    stats.close()
    assert stats.read().pids_stats.current == 0


def test_of_a_container_at_rest_few_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(cgroup, "time", SimpleNamespace(monotonic=lambda: now_s))
    stats = cgroup.CgroupStats(str(tmp_path))

    def peak_after(peak: int, **signs: int) -> int:
        for name, number in {"memory_peak": peak, **signs}.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(f"{number}\n")
        return stats.read().memory_stats.usage.max_usage

    assert peak_after(10, pids_current=1) == 10
    assert peak_after(20) == 10
    assert peak_after(30, pids_current=2) == 30
    assert peak_after(40) == 30
    stats.forget()
    assert peak_after(50) == 50
    assert peak_after(60) == 50
    now_s += cgroup.REST_S
    assert peak_after(70) == 70


def test_a_cgroup_that_is_gone_counts_zero(tmp_path: Path) -> None:
    stats = cgroup.CgroupStats(str(tmp_path / "gone")).read()

    assert stats.memory_stats.usage.usage == 0
    assert stats.hugetlb_stats == {}
