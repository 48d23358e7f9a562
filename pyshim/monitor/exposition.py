"""Prometheus' text format: writes it, and filters the metrics of an untrusted guest.

One bad line would make a whole scrape fail. The filtered text is grouped by family, as the format requires. It has no
time stamps, and no labels that identify sandboxes, so a guest cannot write into the metrics of another one. Source:
prometheus.io, "Exposition formats", text format 0.0.4.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
GUEST_PREFIXES = ("kata_agent_", "kata_guest_")
"""Names that a guest may use."""
MAX_SAMPLES = 10_000
"""Samples of one sandbox. kata-agent sends about 1,000 for a guest of two CPUs, and 10 more for each CPU."""
MAX_LABELS_CHARS = 1024
"""Characters of all labels of one sample."""
RESERVED = frozenset({"sandbox_id", "cri_uid", "cri_name", "cri_namespace"})
"""Labels that the node's endpoint sets. Those that begin with two underscores are Prometheus' own: `__name__`."""
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(
    rf"({_NAME})(?:\{{((?:{_LABEL}(?:,|(?=\}})))*)\}})? +([+-]?(?:[0-9.]+(?:[eE][+-]?[0-9]+)?|Inf|NaN))(?: +-?[0-9]+)?"
)
_LABELS = re.compile(rf"{_LABEL}(?:,|$)")
_SIMPLE = frozenset({"gauge", "counter", "untyped"})
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_RENAMED = ("process_", "go_")
"""Names of agents that leave their prefix to the runtime."""


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


class TextFamily:
    """The lines of one name: `head` are HELP and TYPE, `samples` (name, labels, value), the labels as text."""

    __slots__ = ("help", "kind", "name", "samples")

    def __init__(self, name: str) -> None:
        self.name = name
        self.help = ""
        self.kind = "untyped"
        self.samples: dict[tuple[str, str], str] = {}

    def lines(self, more_labels: str = "") -> list[str]:
        """The samples' lines, each with `more_labels` before its own."""
        found = []
        for (name, labels), value in self.samples.items():
            both = f"{more_labels},{labels}" if more_labels and labels else more_labels or labels
            found.append(f"{name}{{{both}}} {value}" if both else f"{name} {value}")
        return found

    def head(self) -> list[str]:
        help_lines = [f"# HELP {self.name} {self.help}"] if self.help else []
        return [*help_lines, f"# TYPE {self.name} {self.kind}"]


class Filtered(NamedTuple):
    families: Mapping[str, TextFamily]
    problem: str
    """The lines that were left out, and why; empty when none were."""


def filtered(text: str, prefixes: tuple[str, ...], *, composed: bool = False, most: int = MAX_SAMPLES) -> Filtered:
    """The families whose names begin with one of `prefixes`, with `most` samples in all.

    Without `composed` there are neither histograms nor summaries, whose samples would have to fit together.
    """
    suffixes = _SUFFIXES if composed else {}
    families: dict[str, TextFamily] = {}
    owners: dict[str, TextFamily] = {}
    bad, first_bad, samples = 0, "", 0
    for line in text.split("\n"):
        if not line:
            continue
        if line[0] == "#":
            _describe(line, prefixes, families, owners, suffixes)
            continue
        match = _SAMPLE.fullmatch(line.strip())
        name = _renamed(match[1]) if match else ""
        if (
            match is None
            or not name.startswith(prefixes)
            or not _is_number(match[4])
            or len(match[2] or "") > MAX_LABELS_CHARS
        ):
            bad += 1
            first_bad = first_bad or line
            continue
        if samples >= most:
            return Filtered(families, f"more than {most} samples: the others are left out")
        samples += 1
        family = owners.get(name)
        if family is None:
            family = owners[name] = families[name] = TextFamily(name)
        family.samples.setdefault((name, _allowed((match[2] or "").rstrip(","))), match[4])
    return Filtered(families, f"{bad} lines are left out, the first is {first_bad[:80]!r}" if bad else "")


def filtered_text(text: str, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """The text of the families of `filtered`, and its problem."""
    families, problem = filtered(text, prefixes)
    lines = [line for family in families.values() if family.samples for line in (*family.head(), *family.lines())]
    return "".join(f"{line}\n" for line in lines), problem


def _describe(
    line: str,
    prefixes: tuple[str, ...],
    families: dict[str, TextFamily],
    owners: dict[str, TextFamily],
    suffixes: Mapping[str, tuple[str, ...]],
) -> None:
    """Reads a HELP or TYPE line before the family's first sample; ignores other comments."""
    words = line.split(None, 3)
    if len(words) < 4 or words[0] != "#" or words[1] not in ("HELP", "TYPE"):
        return
    name = _renamed(words[2])
    if not re.fullmatch(_NAME, name) or not name.startswith(prefixes) or (name in owners and name not in families):
        return
    family = families.setdefault(name, TextFamily(name))
    owners[name] = family
    if family.samples:
        return
    if words[1] == "HELP":
        family.help = "".join(char for char in words[3] if char.isprintable())[:200].replace("\\", "").strip()
    elif words[3] in _SIMPLE or words[3] in suffixes:
        family.kind = words[3]
        for suffix in suffixes.get(words[3], ()):
            owners.setdefault(name + suffix, family)


def _renamed(name: str) -> str:
    return f"kata_agent_{name}" if name.startswith(_RENAMED) else name


def _allowed(labels: str) -> str:
    """The labels without reserved ones and without repetitions."""
    names = [match[1] for match in _LABELS.finditer(labels)]
    allowed = [name for name in dict.fromkeys(names) if name not in RESERVED and not name.startswith("__")]
    if len(allowed) == len(names):
        return labels
    first = {match[1]: match[0].rstrip(",") for match in reversed(list(_LABELS.finditer(labels)))}
    return ",".join(first[name] for name in allowed)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
