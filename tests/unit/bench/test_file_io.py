"""What the benchmark asks fio for, and what it reads in fio's reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import file_io, report
from bench.rounds import Samples

SHARE = [place for place in file_io.PLACES if place.name == "share"]
NOTHING = {"bw_bytes": 0, "iops": 0.0, "total_ios": 0}


def done(name: str, bw_bytes: int, iops: float) -> dict[str, Any]:
    """A job as fio 3.33 reports it, with what is looked at."""
    side = "read" if name.endswith("read") else "write"
    counts = {"read": NOTHING, "write": NOTHING}
    return {
        "jobname": f"share-{name}",
        "error": 0,
        **counts,
        side: {"bw_bytes": bw_bytes, "iops": iops, "total_ios": 50},
    }


def report_of(**changes: dict[str, Any]) -> str:
    jobs = {
        "read": done("read", 1_800_000_000, 1738.5),
        "write": done("write", 500_000_000, 480.1),
        "randread": done("randread", 50_795_305, 12401.2),
        "randwrite": done("randwrite", 48_563_353, 11856.3),
    }
    return json.dumps({"fio version": "fio-3.33", "jobs": [job | changes.get(name, {}) for name, job in jobs.items()]})


EXPECTED = {"share": {"read": 1800.0, "write": 500.0, "randread": 12401.2, "randwrite": 11856.3}}


def test_sequential_jobs_are_told_in_megabytes_and_random_ones_in_operations() -> None:
    assert file_io.rates(report_of(), SHARE) == EXPECTED


def test_a_remark_before_the_report_is_passed_over() -> None:
    text = "note: both iodepth >= 1 and synchronous I/O engine are selected\n" + report_of()

    assert file_io.rates(text, SHARE) == EXPECTED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "substring not found"),
        ('{"jobs": [', "Expecting value"),
        ("{}", "no 'jobs' in it"),
        ('{"jobs": []}', "no 'share-read' in it"),
        (report_of(write={"error": 28}), "job 'share-write' failed: error 28"),
        (report_of(randread={"read": NOTHING}), "job 'share-randread' did nothing"),
        (report_of(randwrite={"write": {}}), "no 'total_ios' in it"),
    ],
    ids=["empty", "cut off", "no jobs", "a job missing", "no space left", "nothing done", "no counts"],
)
def test_a_report_that_does_not_tell_every_rate_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"read fio's report: .*{why}"):
        file_io.rates(text, SHARE)


def test_a_place_decides_the_file_and_whether_its_page_cache_is_used() -> None:
    for place in file_io.PLACES:
        argv = file_io.fio_argv([place], 500)

        assert [word for word in argv if word.startswith("--name=")] == [
            f"--name={place.name}-{job}" for job in file_io.JOBS
        ]
        assert argv.count(f"--filename={place.directory}/data-{place.name}") == len(file_io.JOBS)
        direct = place.name not in ("cached", "memory")
        assert argv.count(f"--direct={int(direct)}") == argv.count("--stonewall") == len(file_io.JOBS)


def test_every_rate_is_a_row_with_its_ratio_to_the_hosts() -> None:
    samples = Samples()
    for place in file_io.PLACES:
        for job in file_io.JOBS:
            for rate in (100.0, 300.0):
                samples.open_round(f"file_{place.name}_{job}").append(rate / (1 if place == file_io.HOST else 4))

    found = report.rows(samples)

    assert len(found) == (len(file_io.PLACES) - 1) * len(file_io.JOBS)
    assert {row.ratios for row in found} == {(0.25, 0.25)}
    (row,) = [row for row in found if row.title == "fio randwrite, virtio-scsi"]
    assert (row.value, row.reference, row.unit) == (50.0, 200.0, "op/s")
