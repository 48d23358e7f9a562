"""What the host offers, probed once in each shim by `resources/probe.py`. Plans read these values, not the host."""

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from pyshim.model.confidential import NO_TEE, TeeFacts

UNBOUNDED_CPUS = 4096
"""The CPU count assumed for a remote VM's host, which is not known: the largest `default_maxvcpus`."""


class Accelerator(StrEnum):
    KVM = "kvm"
    TCG = "tcg"


class CgroupMode(StrEnum):
    V1 = "v1"
    V2 = "v2"
    NONE = "none"


class VirtiofsdFlavour(StrEnum):
    RUST = "rust"
    C = "c"


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    cpu_count: int
    memory_mib: int
    kvm_usable: bool
    kvm_reason: str
    """Why `kvm_usable` is as it is, for logs and errors."""
    vhost_vsock: bool
    vhost_net: bool
    nested: bool
    """The host is itself a virtual machine (/proc/cpuinfo has the flag `hypervisor`)."""
    cgroup_mode: CgroupMode
    systemd: bool
    tee: TeeFacts = NO_TEE
    tsc_khz: int = 0
    """The rate of the time stamp counter; 0 if the host does not report it."""
    hostname: str = ""
    """The node's host name; empty if it has none."""


def unbounded(host: HostFacts) -> HostFacts:
    """`host` without the limits that its CPUs and memory set: those of a remote VM are not on this host."""
    return replace(host, cpu_count=UNBOUNDED_CPUS, memory_mib=0)
