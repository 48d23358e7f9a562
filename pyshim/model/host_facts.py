"""What the host can do, probed once per shim by `host/probe.py`; decisions read this value, never the host."""

from enum import StrEnum

from pyshim.model.confidential import NO_TEE, TeeFacts
from pyshim.model.dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    cpu_count: int
    memory_mib: int
    cpu_flags: frozenset[str]
    kvm_usable: bool
    kvm_reason: str
    """Why KVM is (not) usable, for logs: what was probed."""
    vhost_vsock: bool
    vhost_net: bool
    nested: bool
    """The host is itself a virtual machine (cpuinfo flag hypervisor)."""
    cgroup_mode: CgroupMode
    systemd: bool
    tee: TeeFacts = NO_TEE
    """Confidential guests this host can run."""
    tsc_khz: int = 0
    """The rate of the time stamp counter; 0 while it was not measured, as on hosts that emulate nothing."""
