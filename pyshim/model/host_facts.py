"""The host's abilities, probed once per shim by `resources/probe.py`; decisions read this value, never the host."""

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from pyshim.model.confidential import NO_TEE, TeeFacts

UNBOUNDED_CPUS = 4096
"""Stands for the CPUs of a host that is not known; `default_maxvcpus` has no higher value."""


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
    """The result of the probe for KVM, for logs."""
    vhost_vsock: bool
    vhost_net: bool
    nested: bool
    """The host is itself a virtual machine (cpuinfo flag hypervisor)."""
    cgroup_mode: CgroupMode
    systemd: bool
    tee: TeeFacts = NO_TEE
    """Confidential guests this host can run."""
    tsc_khz: int = 0
    """The rate of the time stamp counter; 0 when the host does not say it."""
    hostname: str = ""
    """The node's; empty when the host does not say it."""


def unbounded(host: HostFacts) -> HostFacts:
    """`host` as far as it bounds a VM that is not on it: not at all."""
    return replace(host, cpu_count=UNBOUNDED_CPUS, memory_mib=0)
