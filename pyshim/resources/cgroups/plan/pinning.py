"""Assigns vCPUs to CPUs of the host: by the containers' CPU sets, by a placement, or by the guest's NUMA nodes."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from pyshim.model.sizing import Placement
from pyshim.model.vm import GuestNode


class Pinning(msgspec.Struct, frozen=True, kw_only=True):
    pairs: Mapping[int, int]
    """CPU by vCPU, each a number; empty when nothing is pinned."""
    reason: str


def pinning(
    *, vcpus: int, base: Fraction, cpus: frozenset[int], taken: Mapping[int, str], nodes: Sequence[GuestNode] = ()
) -> Pinning:
    """vCPUs one to one on `cpus`, the union of the containers' CPU sets.

    A VM has vCPUs for its base beside those for its work. Kata pins only when there are as many as CPUs, so never with
    a base; here the work's vCPUs, which are the last, are pinned, and those of the base run anywhere on the set.
    `taken` has the sandbox of each CPU that another one pins. A vCPU of one of the guest's `nodes` gets a CPU of the
    host's node behind it.
    """
    if not cpus:
        return _none("not every container has a CPU set")
    spare = vcpus - len(cpus)
    if spare < 0:
        return _none(f"{vcpus} vCPUs for {len(cpus)} CPUs")
    if spare > -(-base.numerator // base.denominator):
        return _none(f"{vcpus} vCPUs are more than {len(cpus)} CPUs and the base")
    if both := sorted(cpus & taken.keys()):
        return _none(f"CPU {both[0]} is pinned by sandbox '{taken[both[0]]}'")
    pairs: dict[int, int] = {}
    groups = [(node.vcpus, sorted(cpus & {*node.cpus})) for node in nodes] or [(tuple(range(vcpus)), sorted(cpus))]
    for number, (members, own) in enumerate(groups):
        if len(own) > len(members):
            return _none(f"{len(own)} CPUs for the {len(members)} vCPUs of the guest's node {number}")
        pairs |= dict(zip(members[len(members) - len(own) :], own, strict=True))
    rest = f"; {spare} of the base run on any of them" if spare else ""
    return Pinning(pairs=pairs, reason=f"{len(pairs)} vCPUs on a CPU each{rest}")


def service_cpus(placement: Placement, cpus: frozenset[int]) -> frozenset[int]:
    """The CPUs for the sandbox's threads other than vCPUs: `cpus` without exclusive ones, or all if none are left."""
    shared = cpus - frozenset(placement.vcpu_cpus) if placement.exclusive else cpus
    return shared or cpus


def placed_pinning(placement: Placement, vcpus: int) -> Pinning:
    """A CPU for each vCPU of an exclusive placement, in order; no pairs for a shared one."""
    own = placement.vcpu_cpus[:vcpus] if placement.exclusive else ()
    return Pinning(pairs=dict(enumerate(own)), reason=placement.why)


def vcpu_cpus(vcpu: int, pinning: Pinning, cpus: frozenset[int], nodes: Sequence[GuestNode]) -> frozenset[int]:
    """The vCPU's own CPU; without one, the `cpus` of the host's node behind its own, or all `cpus`."""
    if vcpu in pinning.pairs:
        return frozenset({pinning.pairs[vcpu]})
    return next((cpus & {*node.cpus} for node in nodes if vcpu in node.vcpus), cpus) or cpus


def _none(why: str) -> Pinning:
    return Pinning(pairs={}, reason=f"not pinned: {why}")
