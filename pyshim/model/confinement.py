"""How the host confines a sandbox's processes: cgroups with their settings, SELinux and AppArmor labels."""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.errors import InvalidArgument
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
    def of_the_vm(self) -> tuple[Role, ...]:
        """The groups of VMM and virtiofsd, which do a VM's I/O and are charged for the guest's memory."""
        return tuple(sorted({self.members[Member.VMM], self.members[Member.VIRTIOFSD]}))

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


_SELINUX = re.compile(r"(?P<user>[\w.-]+):(?P<role>[\w.-]+):(?P<type>[\w.-]+)(?P<level>:[\w.:,-]+)?", re.ASCII)
_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_MAX_CHARS = 4096


class ProcessLabels(msgspec.Struct, frozen=True):
    """The labels that a program gets when it is executed; an empty one is not set."""

    selinux: str = ""
    """`user:role:type:level`; ignored on a host without SELinux."""
    apparmor: str = ""
    """The name of a profile that the host has loaded."""


NO_LABELS = ProcessLabels()


def vmm_selinux_label(text: str, vmm_type: str) -> str:
    """`text`, a spec's `process.selinuxLabel`, with `vmm_type` in place of its type; empty if `text` is empty.

    The level is kept: its pair of categories separates the pod from other pods. Raises InvalidArgument.
    """
    if not text:
        return ""
    found = _SELINUX.fullmatch(text)
    if found is None or len(text) > _MAX_CHARS:
        raise InvalidArgument(f"read spec: process.selinuxLabel {text[:200]!r} is not user:role:type:level")
    if not _TYPE.fullmatch(vmm_type):
        raise InvalidArgument(f"read configuration: selinux_vmm_type {vmm_type[:200]!r} is not an SELinux type")
    return f"{found['user']}:{found['role']}:{vmm_type}{found['level'] or ''}"
