"""The settings of a sandbox's host cgroups: limits from its size, CPU sets from its containers, device rules.

Kata sets no limit of its own and leaves it to the pod's cgroup, where there is one. With `sandbox_cgroup_limits` the
limits are the figures of its sizing record plus the need of the VMM and its servers. Values are those of cgroup v2,
converted for v1 here. Sources: the kernel's admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/, scheduler/
sched-bwc.rst.
"""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from pyshim.model.config import Config
from pyshim.model.confinement import CgroupPlan, GroupSetting, Member, Role
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HOST_SIDE_MIB, CgroupMode, cpu_set, cpuset_text
from pyshim.model.sizing import SizingRecord, decimal
from pyshim.model.units import MIB, MIN_SHARES, SHARES_PER_CPU
from pyshim.resources.sizing.plan.workload import swap_request

SWAP_FILE = "memory.swap.max"
_MOST_DIGITS = 18
"""Of a number of bytes that the kernel takes."""
PERIOD_US = 100_000
HOST_SIDE_CPUS = Fraction(1)
"""CPUs for QEMU's own threads, virtiofsd and the shim together, beside those of busy vCPUs."""
_MAX_SHARES = 262_144
_LEAST_QUOTA_US = 1000

# The devices a running VMM may open: Kata's list.
_DEVICE_RULES = (
    ("c *:* m", "mknod"),
    ("b *:* m", "mknod"),
    ("c 1:3 rwm", "null"),
    ("c 1:5 rwm", "zero"),
    ("c 1:7 rwm", "full"),
    ("c 1:8 rwm", "random"),
    ("c 1:9 rwm", "urandom"),
    ("c 5:0 rwm", "tty"),
    ("c 5:1 rwm", "console"),
    ("c 5:2 rwm", "ptmx"),
    ("c 136:* rwm", "pts"),
    ("c 10:200 rwm", "net/tun"),
    ("c 10:232 rwm", "kvm"),
    ("c 10:238 rwm", "vhost-net"),
    ("c 10:241 rwm", "vhost-vsock"),
    ("c 10:196 rwm", "vfio/vfio"),
)
DEVICE_NODES = ("/dev/mshv", "/dev/iommu", "/dev/userfaultfd", "/dev/sev", "/dev/sgx_vepc")
"""Devices whose numbers the host chooses; the rule is made from the node."""


def limit_settings(plan: CgroupPlan, config: Config, record: SizingRecord) -> tuple[GroupSetting, ...]:
    """The limits of each cgroup; none unless `sandbox_cgroup_limits`."""
    if not config.runtime.sandbox_cgroup_limits or not plan.groups:
        return ()
    cpus = min(record.vcpus.exact, Fraction(record.vcpus.granted))
    ram_mib = 0 if config.hypervisor.enable_hugepages else record.memory_mib.granted
    vcpus_text = f"{decimal(cpus)} CPUs of the sizing record"
    host_text = f"{decimal(HOST_SIDE_CPUS)} CPU for the VMM's own work"
    found: list[GroupSetting] = []
    for group in plan.groups:
        inside = frozenset(member for member, role in plan.members.items() if role is group.role)
        if group.role is Role.SANDBOX and plan.members[Member.VCPUS] is Role.VCPUS:
            inside |= {Member.VCPUS}
        if not inside or group.role is Role.DEVICES:
            continue
        has_vcpus, has_others = Member.VCPUS in inside, bool(inside - {Member.VCPUS})
        quota = (cpus if has_vcpus else Fraction(0)) + (HOST_SIDE_CPUS if has_others else Fraction(0))
        source = " + ".join([vcpus_text] * has_vcpus + [host_text] * has_others)
        found += _cpu(plan.mode, group.role, quota, source)
        if has_others and group.role is not Role.VCPUS:
            found += _memory(plan.mode, group.role, ram_mib if Member.VMM in inside else 0)
            found += _io(plan.mode, group.role, quota, source)
    return tuple(found)


def _cpu(mode: CgroupMode, role: Role, cpus: Fraction, source: str) -> Iterable[GroupSetting]:
    quota_us = max(math.ceil(cpus * PERIOD_US), _LEAST_QUOTA_US)
    shares = _shares(cpus)
    if mode is CgroupMode.V2:
        values = {"cpu.max": f"{quota_us} {PERIOD_US}", "cpu.weight": str(_weight(shares))}
    else:
        # The period first: the kernel checks the pair at each write.
        values = {
            "cpu.cfs_period_us": str(PERIOD_US),
            "cpu.cfs_quota_us": str(quota_us),
            "cpu.shares": str(shares),
        }
    for file, value in values.items():
        yield GroupSetting(role=role, controller="cpu", file=file, value=value, source=source, required=True)


def _memory(mode: CgroupMode, role: Role, ram_mib: int) -> Iterable[GroupSetting]:
    """Above `high` the kernel reclaims memory, above `max` it kills. The host side may double in between."""
    high, most = (ram_mib + HOST_SIDE_MIB) * MIB, (ram_mib + 2 * HOST_SIDE_MIB) * MIB
    ram = f"{ram_mib} MiB of guest RAM + " if ram_mib else ""
    names = (
        ("memory.high", "memory.max")
        if mode is CgroupMode.V2
        else ("memory.soft_limit_in_bytes", "memory.limit_in_bytes")
    )
    for file, value, factor in ((names[0], high, ""), (names[1], most, "2 x ")):
        source = f"{ram}{factor}{HOST_SIDE_MIB} MiB for the VMM and its servers"
        yield GroupSetting(role=role, controller="memory", file=file, value=str(value), source=source, required=True)


def _io(mode: CgroupMode, role: Role, cpus: Fraction, source: str) -> Iterable[GroupSetting]:
    """In proportion to the CPUs. Not required: only some I/O schedulers have weights."""
    file, controller = ("io.weight", "io") if mode is CgroupMode.V2 else ("blkio.bfq.weight", "blkio")
    weight = max(1, min(1000, round(100 * cpus)))
    yield GroupSetting(
        role=role, controller=controller, file=file, value=str(weight), source=f"in proportion to {source}"
    )


def _shares(cpus: Fraction) -> int:
    return max(MIN_SHARES, min(_MAX_SHARES, math.floor(cpus * SHARES_PER_CPU)))


def _weight(shares: int) -> int:
    """v2's weight of v1's shares, as the field converts them. Source: runc libcontainer, ConvertCPUSharesToCgroupV2."""
    return 1 + ((shares - MIN_SHARES) * 9999) // (_MAX_SHARES - MIN_SHARES)


def cpuset_union(resources: Iterable[Mapping[str, Any]], member: str) -> frozenset[int]:
    """The CPUs (`cpus`) or memory nodes (`mems`) of all containers together; empty for no restriction.

    If one container has no set, the sandbox is not restricted. Raises InvalidArgument.
    """
    union: set[int] = set()
    for each in resources:
        text = (each.get("cpu") or {}).get(member) or ""
        found = cpu_set(text, f"linux.resources.cpu.{member}")
        if not found:
            return frozenset()
        union |= found
    return frozenset(union)


def refuse_realtime(resources: Iterable[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument for a real-time slice, which vCPU threads on the host do not have."""
    for each in resources:
        if (each.get("cpu") or {}).get("realtimeRuntime"):
            raise InvalidArgument(
                "set linux.resources.cpu.realtimeRuntime: a VM's vCPUs have no real-time slices of the host"
            )


def checked_cpuset(wanted: frozenset[int], allowed: frozenset[int], what: str, cgroup: str) -> None:
    """Raises InvalidArgument if the cgroup above the sandbox lacks any of `wanted`."""
    if extra := wanted - allowed:
        raise InvalidArgument(
            f"set cpuset of '{cgroup}': {what} {cpuset_text(extra)} of '{cpuset_text(wanted)}' are not there: "
            f"the cgroup above has {cpuset_text(allowed) or 'none'}"
        )


def cpuset_settings(
    plan: CgroupPlan, cpus: frozenset[int], mems: frozenset[int], *, source: str = ""
) -> tuple[GroupSetting, ...]:
    """The sandbox cgroup's sets; an empty value stands for the set of the cgroup above.

    `source` names the origin of sets that are not the containers'.
    """
    if not plan.groups:
        return ()
    return tuple(
        GroupSetting(
            role=Role.SANDBOX,
            controller="cpuset",
            file=f"cpuset.{name}",
            value=cpuset_text(numbers),
            source=(source or f"union of the containers' {name}") if numbers else "not restricted: as the cgroup above",
            required=bool(numbers),
        )
        for name, numbers in (("cpus", cpus), ("mems", mems))
    )


def swap_settings(
    plan: CgroupPlan, resources: Iterable[Mapping[str, Any]], *, has_limit: bool
) -> tuple[GroupSetting, ...]:
    """On v2 VMM and virtiofsd, which hold the guest's memory, are swapped by no more than the containers may together.

    If one container has no limit they have none; one that they had (`has_limit`) is taken back. Without a container the
    last limit stays. A kubelet gives each container a limit, 0 unless the node's `memorySwap` says otherwise.
    """
    limits = [_swap_limit_bytes(each) for each in resources] if plan.mode is CgroupMode.V2 else []
    known = [limit for limit in limits if limit is not None]
    is_limited = len(known) == len(limits)
    if not limits or not (is_limited or has_limit):
        return ()
    return tuple(
        GroupSetting(
            role=role,
            controller="memory",
            file=SWAP_FILE,
            value=str(sum(known)) if is_limited else "max",
            source="sum of what the containers may swap" if is_limited else "not every container has a limit",
        )
        for role in plan.of_the_vm
    )


def _swap_limit_bytes(resources: Mapping[str, Any]) -> int | None:
    """None without a limit, also with one that is no whole number of bytes."""
    text = str((resources.get("unified") or {}).get(SWAP_FILE) or "")
    if text:
        return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
    limit, together, _ = swap_request(resources)
    return max(0, together - limit) if limit and together else None


def device_settings(role: Role, more: Iterable[tuple[str, str]]) -> tuple[GroupSetting, ...]:
    """Denies all devices, then allows those that a VMM needs; in the form of v1, also on v2."""
    everything = GroupSetting(
        role=role, controller="devices", file="devices.deny", value="a", source="all but what follows"
    )
    return (everything, *allowed_devices(role, (*_DEVICE_RULES, *more)))


def allowed_devices(role: Role, rules: Iterable[tuple[str, str]]) -> tuple[GroupSetting, ...]:
    """Allows the processes of that group to open these devices; each rule comes with its source."""
    return tuple(
        GroupSetting(role=role, controller="devices", file="devices.allow", value=rule, source=source)
        for rule, source in rules
    )
