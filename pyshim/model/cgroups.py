"""The host cgroups of one sandbox: their paths, their processes, and the settings written into them."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.host_facts import CgroupMode


class Role(StrEnum):
    """The purpose of a cgroup that the shim makes."""

    SANDBOX = "sandbox"
    """Below the pod's cgroup: its use counts as the pod's."""
    OVERHEAD = "overhead"
    """Outside the pod's cgroup, for the processes that run the VM; not made with `sandbox_cgroup_only`."""
    VCPUS = "vcpus"
    """v2: the threaded cgroup of the vCPU threads, below SANDBOX."""
    DEVICES = "devices"
    """Below the shim's cgroup, for the device list of VMM and virtiofsd. On v1 it is in the devices hierarchy only. On
    v2 it is threaded, and the VMM is not in it if another cgroup has the VMM without the shim."""


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
    """v1: the hierarchies that have it; empty: all."""
    threaded: bool = False
    """v2: it contains threads of a process of its parent."""


class GroupSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One value to be written into one file of a cgroup."""

    role: Role
    controller: str
    file: str
    value: str
    source: str
    """Where the value comes from, for operators."""
    required: bool = False
    """The sandbox does not start if the write fails: the configuration demands the setting."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The systemd scope whose cgroup is the SANDBOX cgroup."""

    unit: str
    slice: str
    description: str


class CgroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    mode: CgroupMode
    groups: tuple[Group, ...]
    """In the order of their creation; empty on a host without cgroups."""
    members: Mapping[Member, Role]
    scope: Scope | None
    notes: tuple[str, ...]
    """One sentence for each part of the request that is not met, with the reason."""

    def group(self, role: Role) -> Group:
        return next(group for group in self.groups if group.role is role)

    @property
    def with_device_list(self) -> tuple[Role, ...]:
        """The groups that get a device list. The shim is in none of them: it mounts disks."""
        serving = {Role.DEVICES}
        if self.mode is CgroupMode.V2:
            serving |= {self.members[Member.VMM], self.members[Member.VCPUS]} - {self.members[Member.SHIM]}
        return tuple(group.role for group in self.groups if group.role in serving)


class HostOom(msgspec.Struct, frozen=True, kw_only=True):
    """The host's OOM killer has killed a process of the sandbox's cgroups."""

    limited_by: str
    """The cgroup whose limit was reached; empty if the whole host had no memory left."""
    limit_bytes: int
