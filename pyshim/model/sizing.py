"""The size of a VM, with the source of every number and the limit of the result, and its place on the host's CPUs."""

import math
import re
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import decoded
from pyshim.model.errors import InvalidArgument
from pyshim.model.units import SHARES_PER_CPU

_SHOWN_PLACES = 3
_FRACTION = re.compile(r"-?[0-9]{1,2000}(/[0-9]{1,2000})?")
"""The text of a Fraction. Its constructor also accepts `1e999999999`, which takes hours."""


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """The computation of a VM's vCPUs or memory: base + requested = exact, rounded up to whole units, then limited."""

    base: Fraction
    base_source: str
    requested: Fraction
    requested_source: str
    exact: Fraction
    unit: int
    """`granted` is a multiple of it: 1, or the MiB of a page or memory block."""
    rounded: int
    """The smallest multiple of `unit` that is not below `exact`."""
    granted: int
    """The VM's size."""
    limited_by: str
    """The name of the limit that made `granted` differ from `rounded`; empty if they are equal."""

    def explain(self, unit_name: str) -> str:
        """The computation on one line."""
        text = (
            f"{decimal(self.base)} ({self.base_source}) + {decimal(self.requested)} ({self.requested_source}) "
            f"= {decimal(self.exact)} -> {self.rounded} {unit_name}"
        )
        if self.granted == self.rounded:
            return text
        verb = "raised" if self.granted > self.rounded else "limited"
        return f"{text}, {verb} to {self.granted} by {self.limited_by}"


class SizingRecord(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    """`sum`, `overhead`, or `dynamic`: the sum over the containers, which changes with them."""
    vcpus: Dimension
    memory_mib: Dimension
    warnings: tuple[str, ...]
    """The capacity check's warnings, and limits that reduced the size."""

    def as_json(self) -> dict[str, object]:
        """The record as a JSON object, with its fractions as text."""
        document: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return {**document, "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, members: object, where: str) -> "SizingRecord":
        """The record that `as_json` wrote. Raises InvalidArgument naming `where` and the first wrong member."""
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
    """base + requested, rounded up once, then limited to `least` and `most`, each a value and its name.

    `most` has precedence.
    """
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
    """`value` with at most three decimal places, with a leading ~ if it was rounded."""
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


# ---- the place: the request to the NRI plugin, and its answer


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one VM needs at its boot."""

    sandbox_id: str
    name: str
    """`NAMESPACE/POD`, for people."""
    vcpus: int
    memory_bytes: int
    """The size of guest RAM."""
    exclusive: bool
    """The vCPUs get CPUs that nothing else runs on: the pod is Guaranteed, with whole numbers of CPUs."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and nodes by the kernel's numbers, each tuple in ascending order and without repetitions."""

    vcpu_cpus: tuple[int, ...]
    """The CPUs of the vCPU threads. An exclusive placement has one for each vCPU, in the order of the vCPUs."""
    service_cpus: tuple[int, ...]
    """The CPUs of virtiofsd and the VMM's other threads: shared CPUs of the same nodes."""
    cpu_nodes: tuple[int, ...]
    """The NUMA nodes of these CPUs, which do not change while the VM runs."""
    memory_nodes: tuple[int, ...]
    """The NUMA nodes that guest RAM is allocated from; empty: any node."""
    exclusive: bool
    why: str
    """For people, on one line: the choice and its cost."""


def whole_cpus(*, shares: int, quota: int, period: int, cgroup_parent: str) -> int:
    """The number of CPUs of a Guaranteed pod or container, if it is a whole number; 0 for any other.

    A Guaranteed one requests as much CPU as its limit, and is not in the kubelet's cgroup of another class. Source:
    Kubernetes' CPU manager, policy "static"; kubelet pkg/kubelet/cm/helpers_linux.go.
    """
    if quota <= 0 or period <= 0 or quota % period:
        return 0
    cpus = quota // period
    if shares != cpus * SHARES_PER_CPU or any(name in cgroup_parent for name in ("burstable", "besteffort")):
        return 0
    return cpus


class SavedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its answer, as in a sandbox's state file."""

    request: PlacementRequest = msgspec.field(name="need")
    placement: Placement


PLACEMENT_SERVICE, PLACEMENT_METHOD = "pyshim.nri.Placements", "Place"
"""The plugin's ttrpc method. Request and reply are a `PlacementRequest` and a `Placement` in JSON."""
PLACEMENT_SOCKET = "/run/pyshim/nri/placement.sock"
"""The plugin's default socket."""
