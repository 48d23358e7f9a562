"""A VM's place on the host: the question to the plugin before the boot, and the answer."""

import msgspec

from pyshim.model.units import SHARES_PER_CPU


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The need of one VM as it boots."""

    sandbox_id: str
    name: str
    """`NAMESPACE/POD`, for people."""
    vcpus: int
    memory_bytes: int
    """Guest RAM."""
    exclusive: bool
    """The vCPUs get CPUs that nothing else runs on: the pod is Guaranteed and all its CPUs are whole numbers."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and nodes by the kernel's numbers, each tuple in ascending order and without repetitions."""

    vcpu_cpus: tuple[int, ...]
    """The vCPU threads run on these. An exclusive placement has one for each vCPU, in the order of the vCPUs."""
    service_cpus: tuple[int, ...]
    """The VMM's other threads and virtiofsd run on these: shared CPUs of the same nodes."""
    cpu_nodes: tuple[int, ...]
    """The NUMA nodes the CPUs are of, as they were chosen; they never change while the VM lives."""
    memory_nodes: tuple[int, ...]
    """Guest RAM comes from these; empty: from any, as on a machine of one node."""
    exclusive: bool
    why: str
    """One line for people: what was chosen, and what that cost."""


def whole_cpus(*, shares: int, quota: int, period: int, cgroup_parent: str) -> int:
    """The CPUs of a Guaranteed pod or container whose CPUs are a whole number; 0 for any other.

    Guaranteed is what asks for as much CPU as it may use, and is in neither of the kubelet's cgroups for the other
    classes. Source: Kubernetes' policies of the CPU manager, "static"; kubelet pkg/kubelet/cm/helpers_linux.go.
    """
    if quota <= 0 or period <= 0 or quota % period:
        return 0
    cpus = quota // period
    if shares != cpus * SHARES_PER_CPU or any(name in cgroup_parent for name in ("burstable", "besteffort")):
        return 0
    return cpus


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The question and its answer, as a sandbox's state has them."""

    need: Need
    placement: Placement


SERVICE, METHOD = "pyshim.nri.Placements", "Place"
"""The ttrpc call of a shim; its messages are a `Need` and a `Placement` in JSON."""
SOCKET = "/run/pyshim/nri/placement.sock"
"""The plugin's default socket."""
