"""The placement of a VM on the host's CPUs and NUMA nodes: the request to the NRI plugin, and its answer."""

import msgspec

from pyshim.model.units import SHARES_PER_CPU


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one VM needs at its boot."""

    sandbox_id: str
    name: str
    """`NAMESPACE/POD`, for people."""
    vcpus: int
    memory_bytes: int
    """The size of guest RAM."""
    exclusive: bool
    """The vCPUs get CPUs that nothing else runs on: the pod is Guaranteed, with whole numbers of CPUs."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and nodes by the kernel's numbers, each tuple in ascending order and without repetitions."""

    vcpu_cpus: tuple[int, ...]
    """The CPUs of the vCPU threads. An exclusive placement has one for each vCPU, in the order of the vCPUs."""
    service_cpus: tuple[int, ...]
    """The CPUs of virtiofsd and the VMM's other threads: shared CPUs of the same nodes."""
    cpu_nodes: tuple[int, ...]
    """The NUMA nodes of these CPUs, which do not change while the VM runs."""
    memory_nodes: tuple[int, ...]
    """The NUMA nodes that guest RAM is allocated from; empty: any node."""
    exclusive: bool
    why: str
    """For people, on one line: the choice and its cost."""


def whole_cpus(*, shares: int, quota: int, period: int, cgroup_parent: str) -> int:
    """The number of CPUs of a Guaranteed pod or container, if it is a whole number; 0 for any other.

    A Guaranteed one requests as much CPU as its limit, and is not in the kubelet's cgroup of another class. Source:
    Kubernetes' CPU manager, policy "static"; kubelet pkg/kubelet/cm/helpers_linux.go.
    """
    if quota <= 0 or period <= 0 or quota % period:
        return 0
    cpus = quota // period
    if shares != cpus * SHARES_PER_CPU or any(name in cgroup_parent for name in ("burstable", "besteffort")):
        return 0
    return cpus


class SavedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its answer, as in a sandbox's state file."""

    request: PlacementRequest = msgspec.field(name="need")
    placement: Placement


SERVICE, METHOD = "pyshim.nri.Placements", "Place"
"""The plugin's ttrpc method. Request and reply are a `PlacementRequest` and a `Placement` in JSON."""
SOCKET = "/run/pyshim/nri/placement.sock"
"""The plugin's default socket."""
