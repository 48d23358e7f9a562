"""Lists of CPUs and of memory nodes in the kernel's text form. Source: cpuset(7), "List format"."""

import re
from collections.abc import Iterable

from pyshim.model.errors import InvalidArgument

_MAX_CPUS = 8192
"""The kernel's largest NR_CPUS on x86-64."""
_WHOLE = re.compile(r"[0-9]{1,20}", re.ASCII)


def cpu_set(text: object, where: str) -> frozenset[int]:
    """The CPUs of a list such as `0-2,5`. Raises InvalidArgument naming `where`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"read {where}: not a list of CPUs: {str(text)[:100]!r}")
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        ends = (first, last if dash else first)
        if not all(_WHOLE.fullmatch(end) and int(end) < _MAX_CPUS for end in ends):
            raise InvalidArgument(f"read {where}: not a list of CPUs below {_MAX_CPUS}: {text[:100]!r}")
        cpus.update(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(cpus)


def cpuset_text(numbers: Iterable[int]) -> str:
    """The list form of `numbers`, such as `0-2,5`; empty without numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
