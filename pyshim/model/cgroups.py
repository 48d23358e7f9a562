"""Host cgroups of one sandbox: which there are, who is in them, what is written into them."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.host_facts import CgroupMode


class Role(StrEnum):
    """The purpose of a cgroup of ours."""

    SANDBOX = "sandbox"
    """Below the pod's cgroup: what counts as the pod's."""
    OVERHEAD = "overhead"
    """Outside the pod's: what it costs the node to run the VM, unless `sandbox_cgroup_only`."""
    VCPUS = "vcpus"
    """v2: the threaded cgroup of the vCPU threads, below SANDBOX."""
    DEVICES = "devices"
    """Below the shim's: the VMM and virtiofsd, without the shim. On v1 in the hierarchy of devices alone. On v2 it is
    threaded, and the VMM is not in it where it has a cgroup without the shim already."""


class Member(StrEnum):
    SHIM = "shim"
    VIRTIOFSD = "virtiofsd"
    VMM = "vmm"
    VCPUS = "vcpus"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    path: str
    """From the root of a hierarchy: `/kubepods/pod1/kata_c1`."""
    controllers: tuple[str, ...] = ()
    """v1: only in the hierarchies of these; empty for all."""
    threaded: bool = False
    """v2: holds threads of a process that lives in the cgroup above."""


class GroupSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One write into one file of a cgroup."""

    role: Role
    controller: str
    file: str
    value: str
    source: str
    """The value's source, for people."""
    required: bool = False
    """Demanded by the configuration: a sandbox without it does not start."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The systemd unit that is the SANDBOX cgroup."""

    unit: str
    slice: str
    description: str


class CgroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    mode: CgroupMode
    groups: tuple[Group, ...]
    """Sorted as they are made; empty on a host without cgroups."""
    members: Mapping[Member, Role]
    scope: Scope | None
    notes: tuple[str, ...]
    """One sentence for each request that is not met in full, with the reason."""

    def group(self, role: Role) -> Group:
        return next(group for group in self.groups if group.role is role)

    @property
    def listed(self) -> tuple[Role, ...]:
        """The groups whose processes may open listed devices only: the shim, which mounts disks, is in none of them."""
        serving = {Role.DEVICES}
        if self.mode is CgroupMode.V2:
            serving |= {self.members[Member.VMM], self.members[Member.VCPUS]} - {self.members[Member.SHIM]}
        return tuple(group.role for group in self.groups if group.role in serving)


class HostOom(msgspec.Struct, frozen=True, kw_only=True):
    """The host's OOM killer took a process of a cgroup."""

    limited_by: str
    """The cgroup whose limit was met; empty when the host itself had no memory left."""
    limit_bytes: int
