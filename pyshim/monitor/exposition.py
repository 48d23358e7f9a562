"""Writes Prometheus' text format.

Source: prometheus.io, "Exposition formats", text format 0.0.4.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float
    suffix: str = ""
    """The end of the name: `_bucket`, `_sum` or `_count` in a histogram."""


class Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: str
    """gauge, counter or histogram."""
    help: str
    samples: tuple[Sample, ...]


def gauge(name: str, help_text: str, value: float) -> Family:
    return Family(name, "gauge", help_text, (Sample({}, value),))


def gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Family:
    """One gauge for each value, distinguished by `label`."""
    return Family(name, "gauge", help_text, tuple(Sample({label: key}, value) for key, value in values.items()))


def text_of(families: Iterable[Family]) -> str:
    """The families as text; those without samples are left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [
                f"{family.name}{each.suffix}{_labels(each.labels)} {_number(each.value)}" for each in family.samples
            ]
    return "".join(f"{line}\n" for line in lines)


def labels_text(labels: Mapping[str, str]) -> str:
    """`a="b",c="d"`."""
    return ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items())


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{labels_text(labels)}}}" if labels else ""


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) or value % 1 else repr(int(value))
