"""What is kept of a sizing decision: every number, where it came from, and what limited the result."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from pyshim.model.dataclasses import dataclass
from pyshim.model.errors import InvalidArgument

_SHOWN_PLACES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension's arithmetic: base + requested = exact, rounded up to whole units, then held within limits."""

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
    """What the VM has."""
    limited_by: str
    """What made `granted` differ from `rounded`; empty when nothing did."""

    def as_json(self) -> dict[str, str | int]:
        return {
            "base": str(self.base),
            "base_source": self.base_source,
            "requested": str(self.requested),
            "requested_source": self.requested_source,
            "exact": str(self.exact),
            "unit": self.unit,
            "rounded": self.rounded,
            "granted": self.granted,
            "limited_by": self.limited_by,
        }

    @classmethod
    def from_json(cls, members: object, where: str) -> "Dimension":
        """The dimension `as_json` made. Raises InvalidArgument naming the member that is missing or wrong."""
        reader = _Reader(members, where)
        return cls(
            base=reader.fraction("base"),
            base_source=reader.text("base_source"),
            requested=reader.fraction("requested"),
            requested_source=reader.text("requested_source"),
            exact=reader.fraction("exact"),
            unit=reader.whole("unit"),
            rounded=reader.whole("rounded"),
            granted=reader.whole("granted"),
            limited_by=reader.text("limited_by"),
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRecord:
    """One decision. `policy` is `sum`, `overhead`, or `dynamic` (sum over the containers, as they come and go)."""

    policy: str
    vcpus: Dimension
    memory_mib: Dimension
    warnings: tuple[str, ...] = ()
    """What the capacity check had to say, and limits that took something away."""

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "vcpus": self.vcpus.as_json(),
            "memory_mib": self.memory_mib.as_json(),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, members: object, where: str) -> "SizingRecord":
        """The record `as_json` made. Raises InvalidArgument naming the member that is missing or wrong."""
        reader = _Reader(members, where)
        return cls(
            policy=reader.text("policy"),
            vcpus=Dimension.from_json(reader.member("vcpus"), f"{where}.vcpus"),
            memory_mib=Dimension.from_json(reader.member("memory_mib"), f"{where}.memory_mib"),
            warnings=reader.texts("warnings"),
        )

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
    """base + requested, rounded up once, then held within `least` and `most` (value, its name); `most` wins."""
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


class _Reader:
    def __init__(self, members: object, where: str) -> None:
        if not isinstance(members, Mapping):
            raise InvalidArgument(f"read {where}: not an object")
        self._members, self._where = members, where

    def member(self, name: str) -> object:
        if name not in self._members:
            raise InvalidArgument(f"read {self._where}: {name} is missing")
        return self._members[name]

    def text(self, name: str) -> str:
        value = self.member(name)
        if not isinstance(value, str):
            raise InvalidArgument(f"read {self._where}: {name} is not a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.member(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidArgument(f"read {self._where}: {name} is not a list of texts")
        return tuple(value)

    def whole(self, name: str) -> int:
        value = self.member(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgument(f"read {self._where}: {name} is not a whole number")
        return value

    def fraction(self, name: str) -> Fraction:
        text = self.text(name)
        try:
            return Fraction(text)
        except (ValueError, ZeroDivisionError) as exc:
            raise InvalidArgument(f"read {self._where}: {name} is not a fraction: {text[:100]!r}") from exc
