"""The overhead (podFixed) of a RuntimeClass: what a VM takes of the node beyond its pod's limits."""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from pyshim.model.config import Config
from pyshim.node.kubernetes.pod_vm import BLOCK_MIB
from pyshim.resources.sizing.plan.static import DYNAMIC, OVERHEAD, least_memory_mib, memory_unit_mib

HOST_SIDE = "host side"
"""The name of the part for VMM, file server and shim, beside guest RAM."""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """A RuntimeClass's podFixed."""

    cpus: Fraction = Fraction(0)
    memory_mib: Fraction = Fraction(0)


class OverheadPart(Overhead, frozen=True, kw_only=True):
    """A part of a RuntimeClass's podFixed, and where it comes from."""

    name: str


def class_overhead(config: Config, policy: str, host_side_mib: int) -> Overhead:
    """The least overhead that covers the VM of every pod that states its limits: the sum of `class_parts`."""
    return total(class_parts(config, policy, host_side_mib))


def total(parts: Sequence[OverheadPart]) -> Overhead:
    return Overhead(
        cpus=sum((each.cpus for each in parts), Fraction(0)),
        memory_mib=sum((each.memory_mib for each in parts), Fraction(0)),
    )


def class_parts(config: Config, policy: str, host_side_mib: int) -> tuple[OverheadPart, ...]:
    """Base, the most that rounding adds to memory, and the host side; never below the smallest VM's.

    A remote VM has the host side only.
    """
    beside = OverheadPart(name=HOST_SIDE, memory_mib=Fraction(host_side_mib))
    if config.is_remote:
        return (beside,)
    hypervisor = config.hypervisor
    by_overhead = policy == OVERHEAD
    base_mib = hypervisor.overhead_memory_mib if by_overhead else hypervisor.default_memory_mib
    unit_mib = BLOCK_MIB if policy == DYNAMIC else memory_unit_mib(hypervisor)
    least_mib = least_memory_mib(hypervisor, by_overhead=by_overhead)
    base = OverheadPart(
        name="overhead_*" if by_overhead else "default_*",
        # A VM of all of the host's CPUs (-1) shares them with the node: no overhead covers it.
        cpus=hypervisor.overhead_vcpus if by_overhead else max(Fraction(0), hypervisor.default_vcpus),
        memory_mib=Fraction(base_mib),
    )
    more_mib = Fraction(max(unit_mib, least_mib - base_mib))
    why = f"up to the smallest VM, {least_mib} MiB" if more_mib > unit_mib else f"rounding up to {unit_mib} MiB"
    return (base, OverheadPart(name=why, memory_mib=more_mib), beside)
