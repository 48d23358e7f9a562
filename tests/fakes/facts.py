"""Facts of an ordinary host, and changes to them."""

from typing import Any

from pyshim.model.host_facts import CapacityFacts, CgroupLimits, CgroupMode, HostFacts

UNLIMITED = CgroupLimits(memory_bytes=None, memory_path="", cpu_quota=None, cpu_path="")
PLENTY = CapacityFacts(available_mib=1 << 20, swap_free_mib=0, backing=None, cgroup=UNLIMITED)
"""Room for any VM."""


def host_facts(**changes: Any) -> HostFacts:
    """A host of 8 CPUs and 16 GiB without KVM, vhost and systemd, with cgroup v1."""
    fields: dict[str, Any] = {
        "cpu_count": 8,
        "memory_mib": 16384,
        "kvm_usable": False,
        "kvm_reason": "the CPU shows neither vmx nor svm",
        "vhost_vsock": False,
        "vhost_net": False,
        "nested": False,
        "cgroup_mode": CgroupMode.V1,
        "systemd": False,
        "hostname": "node-7",
    }
    return HostFacts(**{**fields, **changes})
