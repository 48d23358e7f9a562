"""Host cgroups of one sandbox: which there are, who is in them, what is written into them."""

from collections.abc import Mapping
from enum import StrEnum

from pyshim.model.dataclasses import dataclass
from pyshim.model.host_facts import CgroupMode


class Role(StrEnum):
    """What a cgroup of ours is for."""

    SANDBOX = "sandbox"
    """Below the pod's cgroup: what counts as the pod's."""
    OVERHEAD = "overhead"
    """Outside the pod's: what it costs the node to run the VM, unless `sandbox_cgroup_only`."""
    VCPUS = "vcpus"
    """v2: the threaded cgroup of the vCPU threads, below SANDBOX."""
    DEVICES = "devices"
    """v1: below the VMM's, in the hierarchy of devices alone: the VMM and virtiofsd, without the shim."""


class Member(StrEnum):
    SHIM = "shim"
    VIRTIOFSD = "virtiofsd"
    VMM = "vmm"
    VCPUS = "vcpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    role: Role
    path: str
    """From the root of a hierarchy: `/kubepods/pod1/kata_c1`."""
    controllers: tuple[str, ...] = ()
    """v1: only in the hierarchies of these; empty for all."""
    threaded: bool = False
    """v2: holds threads of a process that lives in the cgroup above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One write into one file of a cgroup."""

    role: Role
    controller: str
    file: str
    value: str
    source: str
    """What the value comes from, for people."""
    required: bool = False
    """Demanded by the configuration: a sandbox without it does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The systemd unit that is the SANDBOX cgroup."""

    unit: str
    slice: str
    description: str
    devices: tuple[str, ...]
    """v2: what systemd lets its processes open, in the words of DeviceAllow; empty where rules are ours (v1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlan:
    mode: CgroupMode
    groups: tuple[Group, ...]
    """In the order they are made; empty where the host has no cgroups."""
    members: Mapping[Member, Role]
    scope: Scope | None
    notes: tuple[str, ...]
    """Where this is less than what was asked for, and why."""

    def group(self, role: Role) -> Group | None:
        return next((group for group in self.groups if group.role is role), None)

    def path(self, role: Role) -> str:
        """Empty when there is no such cgroup."""
        group = self.group(role)
        return group.path if group is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOom:
    """The host's OOM killer took a process of a cgroup."""

    limited_by: str
    """The cgroup whose limit was met; empty when the host itself had no memory left."""
    limit_bytes: int
