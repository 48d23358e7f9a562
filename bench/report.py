"""Samples to rows, and rows to text. A ratio is the median of its rounds' ratios, so that slow drift cancels out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import file_io
from bench.rounds import Samples


class Question(NamedTuple):
    """One row of the table: a series, the series it is compared with, and how both are shown."""

    title: str
    series: str
    reference: str
    reference_title: str
    unit: str

    @property
    def scale(self) -> float:
        """Times are measured in seconds."""
        return 1000.0 if self.unit == "ms" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over all samples, in `unit`; `ratios` has one number per round."""

    title: str
    unit: str
    value: float
    spread: tuple[float, float]
    reference_title: str
    reference: float
    ratio: float
    ratios: tuple[float, ...]


QUESTIONS = (
    Question("`start`", "start_pykata", "start_bare", "bare interpreter", "ms"),
    Question("`start` of runc's shim", "start_runc", "start_bare", "bare interpreter", "ms"),
    Question("`delete` of a container whose pod runs", "delete_pykata", "delete_runc", "runc's shim", "ms"),
    Question("of which CPU time", "delete_cpu_pykata", "delete_cpu_runc", "runc's shim", "ms"),
    Question("idle daemon, PSS", "pss_pykata", "pss_runc", "runc's shim", "MiB"),
    Question("idle daemon, private memory", "private_pykata", "private_runc", "runc's shim", "MiB"),
    Question("`ctr run` to first output", "output_pykata", "output_bare", "bare kernel boot", "ms"),
    Question("`ctr run` to first output, forked shim", "output_forked", "output_bare", "bare kernel boot", "ms"),
    Question("`ctr run` to first output, cloned VM", "output_cloned", "output_bare", "bare kernel boot", "ms"),
    Question(
        "`ctr run` to first output, cloned VM, forked shim",
        "output_cloned_forked",
        "output_bare",
        "bare kernel boot",
        "ms",
    ),
    Question("the shim alone, image by virtio-fs", "alone_shared", "output_bare", "bare kernel boot", "ms"),
    Question("the shim alone, image on disks", "alone_disks", "output_bare", "bare kernel boot", "ms"),
    Question("the shim alone, cloned VM, virtio-fs", "alone_cloned_shared", "output_bare", "bare kernel boot", "ms"),
    Question(
        "the shim alone, cloned VM, image on disks", "alone_cloned_disks", "output_bare", "bare kernel boot", "ms"
    ),
    Question("the same through runc's shim", "output_runc", "output_bare", "bare kernel boot", "ms"),
    Question("a pod's memory, PSS, image on disks", "pod_pss_disks", "pod_pss_shared", "virtio-fs", "MiB"),
    Question("the same, cloned VM, virtio-fs", "pod_pss_cloned_shared", "pod_pss_shared", "virtio-fs", "MiB"),
    Question("the same, cloned VM, image on disks", "pod_pss_cloned_disks", "pod_pss_shared", "virtio-fs", "MiB"),
    Question("`ctr task exec`, /bin/true", "exec_pykata", "exec_runc", "runc's shim", "ms"),
    Question("of which `ctr` itself (`ctr version`)", "exec_client", "exec_pykata", "the exec", "ms"),
    Question("of which the shim's CPU time", "exec_shim_cpu", "exec_pykata", "the exec", "ms"),
    Question("stdout to a file", "stdout_pykata", "stdout_runc", "runc's shim", "MB/s"),
    Question("stdout to a file, stand-in VM", "stub_stdout", "stub_stdout_runc", "runc's shim", "MB/s"),
    Question("Create and Start, stand-in VM", "stub_create", "start_bare", "bare interpreter", "ms"),
    Question("ten Creates and Starts at once", "stub_ten", "stub_create", "one of them", "ms"),
    Question("Create and Start, stand-in VM, forked shim", "forked_create", "stub_create", "executed shim", "ms"),
    Question("`start` with a zygote", "forked_start", "forked_bare", "bare interpreter", "ms"),
    Question("one forked shim, PSS", "forked_lone_pss", "pss_pykata", "executed shim", "MiB"),
    Question("many forked shims, PSS each, zygote included", "forked_pss", "pss_pykata", "executed shim", "MiB"),
    Question("many forked shims, private memory each", "forked_private", "private_pykata", "executed shim", "MiB"),
)
FILE_QUESTIONS = tuple(
    Question(
        f"fio {job}, {place.title}",
        f"file_{place.name}_{job}",
        f"file_{file_io.HOST.name}_{job}",
        file_io.HOST.title,
        "op/s" if in_operations else "MB/s",
    )
    for job, (_, in_operations) in file_io.JOBS.items()
    for place in file_io.PLACES
    if place != file_io.HOST and job in place.jobs
)


def rows(samples: Samples) -> list[Row]:
    """A row for each question; rows about files and the shim itself only if they were measured."""
    groups = (QUESTIONS, FILE_QUESTIONS)
    asked = [question for group in groups if group[0].series in samples.by_round for question in group]
    return [_row(question, samples.by_round) for question in asked]


def _row(question: Question, by_round: Mapping[str, list[list[float]]]) -> Row:
    measured, reference = by_round[question.series], by_round[question.reference]
    values = [value * question.scale for values in measured for value in values]
    ratios = tuple(median(one) / median(other) for one, other in zip(measured, reference, strict=True))
    return Row(
        title=question.title,
        unit=question.unit,
        value=median(values),
        spread=(min(values), max(values)),
        reference_title=question.reference_title,
        reference=median(value * question.scale for values in reference for value in values),
        ratio=median(ratios),
        ratios=ratios,
    )


HEADINGS = ("what", "median", "least .. most", "reference", "median", "ratio")


def cells(row: Row) -> tuple[str, ...]:
    low, high = (_number(value) for value in row.spread)
    measured, reference = f"{_number(row.value)} {row.unit}", f"{_number(row.reference)} {row.unit}"
    return row.title, measured, f"{low} .. {high}", row.reference_title, reference, f"{_number(row.ratio)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_text(found: list[Row]) -> str:
    table = [HEADINGS, *(tuple(cell.replace("`", "") for cell in cells(row)) for row in found)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def as_markdown(found: list[Row], facts: Mapping[str, str], note: str) -> str:
    lines = ["# What the shim costs", "", "Made by `make bench`; see [bench](../__init__.py).", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", note, ""] if note else [""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|---|---:|---:|---|---:|---:|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in found]
    lines += [
        "",
        "A ratio is the median, over the rounds, of the round's median over that of the reference in the same round.",
        "For MB/s and op/s more is better; for everything else less is.",
        "",
        "![The ratios of every round](bench.svg)",
    ]
    return "\n".join(lines) + "\n"


def write_json(path: Path, found: list[Row], samples: Samples, facts: Mapping[str, str], note: str) -> None:
    """Rows and every single sample (seconds, MiB or MB/s), rounded to four digits after the point."""
    raw = {
        name: [[round(value, 4) for value in one] for one in by_round] for name, by_round in samples.by_round.items()
    }
    data = {"facts": dict(facts), "note": note, "rows": [asdict(row) for row in found], "samples": raw}
    path.write_text(json.dumps(data, indent=1) + "\n")
