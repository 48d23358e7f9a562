"""The record of a sizing decision: every number, where it came from, and what limited the result."""

import math
import re
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import decoded
from pyshim.model.errors import InvalidArgument

_SHOWN_PLACES = 3
_FRACTION = re.compile(r"-?[0-9]{1,2000}(/[0-9]{1,2000})?")
"""The form that `str` writes. `Fraction` also reads `1e999999999`, which takes hours."""


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension's arithmetic: base + requested = exact, rounded up to whole units, then limited."""

    base: Fraction
    base_source: str
    requested: Fraction
    requested_source: str
    exact: Fraction
    unit: int
    """The result is a multiple of it: 1, or a page or block of memory in MiB."""
    rounded: int
    """The smallest multiple of `unit` that is not below `exact`."""
    granted: int
    """The VM's size."""
    limited_by: str
    """The limit that made `granted` differ from `rounded`; empty without one."""

    def explain(self, unit_name: str) -> str:
        """The arithmetic on one line."""
        text = (
            f"{decimal(self.base)} ({self.base_source}) + {decimal(self.requested)} ({self.requested_source}) "
            f"= {decimal(self.exact)} -> {self.rounded} {unit_name}"
        )
        if self.granted == self.rounded:
            return text
        verb = "raised" if self.granted > self.rounded else "limited"
        return f"{text}, {verb} to {self.granted} by {self.limited_by}"


class SizingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. `policy` is `sum`, `overhead`, or `dynamic` (sum over the containers, as they come and go)."""

    policy: str
    vcpus: Dimension
    memory_mib: Dimension
    warnings: tuple[str, ...]
    """Warnings of the capacity check, and limits that took something away."""

    def as_json(self) -> dict[str, object]:
        """The record with its fractions as text."""
        document: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return {**document, "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, members: object, where: str) -> "SizingRecord":
        """The record `as_json` made. Raises InvalidArgument naming the member that is missing or wrong."""
        return decoded(members, cls, lambda problem: InvalidArgument(f"read {where}: {problem}"), hook=_fraction)

    def with_warnings(self, *more: str) -> "SizingRecord":
        return replace(self, warnings=(*self.warnings, *more))


def dimension(
    *,
    base: Fraction,
    base_source: str,
    requested: Fraction,
    requested_source: str,
    unit: int,
    least: tuple[int, str],
    most: tuple[int, str],
) -> Dimension:
    """base + requested, rounded up once, then limited by `least` and `most` (value, its name); `most` wins."""
    exact = base + requested
    rounded = math.ceil(exact / unit) * unit
    granted, limited_by = rounded, ""
    if granted < least[0]:
        granted, limited_by = math.ceil(Fraction(least[0], unit)) * unit, least[1]
    if granted > most[0]:
        granted, limited_by = most[0] // unit * unit, most[1]
    return Dimension(
        base=base,
        base_source=base_source,
        requested=requested,
        requested_source=requested_source,
        exact=exact,
        unit=unit,
        rounded=rounded,
        granted=granted,
        limited_by=limited_by if granted != rounded else "",
    )


def decimal(value: Fraction) -> str:
    """`value` with at most three places; a leading ~ says that more would follow."""
    scaled = value * 10**_SHOWN_PLACES
    nearest = math.floor(scaled + Fraction(1, 2))
    sign = "-" if nearest < 0 else ""
    whole, part = divmod(abs(nearest), 10**_SHOWN_PLACES)
    places = f".{part:0{_SHOWN_PLACES}d}".rstrip("0").rstrip(".")
    return f"{'' if nearest == scaled else '~'}{sign}{whole}{places}"


def _fraction(_kind: type, text: object) -> Fraction:
    try:
        if isinstance(text, str) and _FRACTION.fullmatch(text):
            return Fraction(text)
    except ZeroDivisionError:
        pass
    raise ValueError(f"is not a fraction: {str(text)[:100]!r}")
