"""Samples to rows, and rows to text. A ratio is the median of its rounds' ratios, so that slow drift cancels out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench import file_io
from bench.rounds import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row of the table: a series, the series it is compared with, and how both are shown."""

    title: str
    series: str
    reference: str
    reference_title: str
    unit: str
    scale: float = 1.0


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


_MS = 1000.0
_TRUE = "`ctr task exec`, /bin/true"
QUESTIONS = (
    Question(
        title="`start`",
        series="start_pykata",
        reference="start_bare",
        reference_title="bare interpreter",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="`start` of runc's shim",
        series="start_runc",
        reference="start_bare",
        reference_title="bare interpreter",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="idle daemon, PSS", series="pss_pykata", reference="pss_runc", reference_title="runc's shim", unit="MiB"
    ),
    Question(
        title="idle daemon, private memory",
        series="private_pykata",
        reference="private_runc",
        reference_title="runc's shim",
        unit="MiB",
    ),
    Question(
        title="`ctr run` to first output",
        series="output_pykata",
        reference="output_bare",
        reference_title="bare kernel boot",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="`ctr run` to first output, forked shim",
        series="output_forked",
        reference="output_bare",
        reference_title="bare kernel boot",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="the same through runc's shim",
        series="output_runc",
        reference="output_bare",
        reference_title="bare kernel boot",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title=_TRUE, series="exec_pykata", reference="exec_runc", reference_title="runc's shim", unit="ms", scale=_MS
    ),
    Question(
        title="of which `ctr` itself (`ctr version`)",
        series="exec_client",
        reference="exec_pykata",
        reference_title="the exec",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="of which the shim's CPU time",
        series="exec_shim_cpu",
        reference="exec_pykata",
        reference_title="the exec",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="stdout to a file",
        series="stdout_pykata",
        reference="stdout_runc",
        reference_title="runc's shim",
        unit="MB/s",
    ),
    Question(
        title="stdout to a file, stand-in VM",
        series="stub_stdout",
        reference="stub_stdout_runc",
        reference_title="runc's shim",
        unit="MB/s",
    ),
    Question(
        title="Create and Start, stand-in VM",
        series="stub_create",
        reference="start_bare",
        reference_title="bare interpreter",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="the same, without the wait for the stand-in to come up",
        series="stub_create_own",
        reference="start_bare",
        reference_title="bare interpreter",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="ten Creates and Starts at once",
        series="stub_ten",
        reference="stub_create",
        reference_title="one of them",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="Create and Start, stand-in VM, forked shim",
        series="forked_create",
        reference="stub_create",
        reference_title="executed shim",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="of a forked shim, without the wait for the stand-in to come up",
        series="forked_create_own",
        reference="stub_create_own",
        reference_title="executed shim",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="`start` with a zygote",
        series="forked_start",
        reference="forked_bare",
        reference_title="bare interpreter",
        unit="ms",
        scale=_MS,
    ),
    Question(
        title="one forked shim, PSS",
        series="forked_lone_pss",
        reference="pss_pykata",
        reference_title="executed shim",
        unit="MiB",
    ),
    Question(
        title="many forked shims, PSS each, zygote included",
        series="forked_pss",
        reference="pss_pykata",
        reference_title="executed shim",
        unit="MiB",
    ),
    Question(
        title="many forked shims, private memory each",
        series="forked_private",
        reference="private_pykata",
        reference_title="executed shim",
        unit="MiB",
    ),
)


FILE_QUESTIONS = tuple(
    Question(
        title=f"fio {job}, {place.title}",
        series=f"file_{place.name}_{job}",
        reference=f"file_{file_io.HOST.name}_{job}",
        reference_title=file_io.HOST.title,
        unit="op/s" if in_operations else "MB/s",
    )
    for job, (_, in_operations) in file_io.JOBS.items()
    for place in file_io.PLACES
    if place != file_io.HOST
)


def rows(samples: Samples) -> list[Row]:
    """A row for each question; those about files and the shim itself only when that was measured."""
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
