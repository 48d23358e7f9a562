"""The devices of a pod: what is asked for, by whom, and what that is on this host."""

from collections.abc import Mapping

import msgspec

VFIO_DIR = "/dev/vfio/"
VFIO_CONTAINER = "/dev/vfio/vfio"
"""The node that every VFIO program opens first; it is not a device."""
IOMMUFD_DIR = "/dev/vfio/devices/"


def is_vfio_node(path: str) -> bool:
    """True if `path` is the node of an IOMMU group or of one function."""
    return path.startswith(VFIO_DIR) and path != VFIO_CONTAINER


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Qualified CDI name."""
    origin: str
    """The source of the request, for the log."""
    container: str = ""
    """The container's name in the pod; empty where the asker named none."""


class DeviceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The question about a sandbox's or a container's devices."""

    pod_name: str = ""
    pod_namespace: str = ""
    kubelet_socket: str = ""
    """Ask the kubelet there what the pod was given; empty: do not."""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The annotations that ask for devices, `cdi.k8s.io/...`."""
    nodes: tuple[str, ...] = ()
    """VFIO nodes that a spec has already."""
    names_only: bool = False
    """The devices are not of this host: who asked for what is the whole answer."""

    @property
    def is_empty(self) -> bool:
        return not (self.kubelet_socket or self.annotations or self.nodes)


class HostFunction(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI function of this host."""

    address: str
    vendor: str
    device: str
    class_code: str
    """The last three as sysfs has them: `0x10de`, `0x2331`, `0x030200`."""
    numa_node: int = -1
    """Which of the host's nodes it is near; -1 where the firmware does not say."""


class VfioNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that opens functions to a VM: an IOMMU group's node with all its functions, or one function's own node."""

    path: str
    functions: tuple[HostFunction, ...]

    @property
    def iommufd(self) -> bool:
        return self.path.startswith(IOMMUFD_DIR)

    @property
    def number(self) -> str:
        """N of `/dev/vfio/N` and of `/dev/vfio/devices/vfioN`."""
        return self.path.rpartition("/")[2].removeprefix("vfio")


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True):
    request: DeviceRequest
    """CDI names of the nodes; the name is empty for a node that the spec has already."""
    nodes: tuple[VfioNode, ...]
    env: tuple[str, ...] = ()
    """Environment that the device's spec sets in a container."""
    left_out: tuple[str, ...] = ()
    """The spec's other edits of a container on this host, as text; a guest gets none of them."""


class PodDevices(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[FoundDevice, ...] = ()
    cpu_ids: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """Exclusive CPUs by container, as the kubelet gave them."""
    memory: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """Bytes by NUMA nodes (`0`, `0,1`), by container."""

    def nodes(self) -> tuple[VfioNode, ...]:
        """Each node once, in the order of the devices."""
        return tuple({node.path: node for found in self.devices for node in found.nodes}.values())


class PodResources(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's record of one pod."""

    requests: tuple[DeviceRequest, ...] = ()
    cpu_ids: dict[str, tuple[int, ...]] = {}
    memory: dict[str, dict[str, int]] = {}
