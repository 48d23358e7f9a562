"""Which vCPU runs on which CPU of the host, when the containers have CPUs of their own."""

from collections.abc import Mapping
from fractions import Fraction

import msgspec

from pyshim.model.placement import Placement


class Pinning(msgspec.Struct, frozen=True, kw_only=True):
    pairs: Mapping[int, int]
    """CPU by vCPU, each a number; empty when nothing is pinned."""
    reason: str


def pinning(*, vcpus: int, base: Fraction, cpus: frozenset[int], taken: Mapping[int, str]) -> Pinning:
    """vCPUs one to one on `cpus`, the union of the containers' CPU sets.

    A VM has vCPUs for its base beside those for its work. Kata pins only when there are as many as CPUs, so never with
    a base; here the work's vCPUs, which are the last, are pinned, and those of the base run anywhere on the set.
    `taken` says which CPUs other sandboxes of this node pin.
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
    pairs = dict(zip(range(spare, vcpus), sorted(cpus), strict=True))
    rest = f"; {spare} of the base run on any of them" if spare else ""
    return Pinning(pairs=pairs, reason=f"{len(pairs)} vCPUs on a CPU each{rest}")


def service_cpus(placement: Placement, cpus: frozenset[int]) -> frozenset[int]:
    """Those of `cpus` that are not vCPUs' alone: for everything of the sandbox but vCPUs with a CPU each."""
    shared = cpus - frozenset(placement.vcpu_cpus) if placement.exclusive else cpus
    return shared or cpus


def _none(why: str) -> Pinning:
    return Pinning(pairs={}, reason=f"not pinned: {why}")
