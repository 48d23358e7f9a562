"""The devices of a pod: requests for them, and the host's devices that match."""

from collections.abc import Mapping

import msgspec

VFIO_DIR = "/dev/vfio/"
VFIO_CONTAINER = "/dev/vfio/vfio"
"""The node that every VFIO program opens first; it is no device."""
IOMMUFD_DIR = "/dev/vfio/devices/"


def is_vfio_node(path: str) -> bool:
    """`path` is the node of an IOMMU group or of a single function."""
    return path.startswith(VFIO_DIR) and path != VFIO_CONTAINER


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Qualified CDI name."""
    origin: str
    """Who made the request, for the log."""
    container: str = ""
    """The container's name in the pod; empty for a request that names none."""


class DeviceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The sources to search for the devices of a sandbox or a container."""

    pod_name: str = ""
    pod_namespace: str = ""
    kubelet_socket: str = ""
    """The kubelet's socket, which lists the devices allocated to the pod; empty: do not ask it."""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The annotations `cdi.k8s.io/...`."""
    nodes: tuple[str, ...] = ()
    """The VFIO nodes in the spec."""
    names_only: bool = False
    """Return the requests without searching this host for the devices, which a remote VM has."""

    @property
    def is_empty(self) -> bool:
        return not (self.kubelet_socket or self.annotations or self.nodes)


class HostFunction(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI function of this host."""

    address: str
    vendor: str
    device: str
    class_code: str
    """As in sysfs: vendor `0x10de`, device `0x2331`, class `0x030200`."""
    numa_node: int = -1
    """The host's NUMA node that it is attached to; -1 if the firmware does not report it."""


class VfioNode(msgspec.Struct, frozen=True, kw_only=True):
    """The device node of an IOMMU group, with all functions of the group, or the node of one function."""

    path: str
    functions: tuple[HostFunction, ...]

    @property
    def iommufd(self) -> bool:
        return self.path.startswith(IOMMUFD_DIR)

    @property
    def number(self) -> str:
        """N of `/dev/vfio/N` or `/dev/vfio/devices/vfioN`."""
        return self.path.rpartition("/")[2].removeprefix("vfio")


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True):
    request: DeviceRequest
    """Its name is empty for a node in the spec."""
    nodes: tuple[VfioNode, ...]
    env: tuple[str, ...] = ()
    """Environment variables that the CDI spec sets in a container."""
    left_out: tuple[str, ...] = ()
    """The other edits of the CDI spec, as text: they concern this host and are not applied in a guest."""


class PodDevices(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[FoundDevice, ...] = ()
    cpu_ids: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """By container: the exclusive CPUs that the kubelet has allocated."""
    memory: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """By container, then by NUMA nodes (`0`, `0,1`): the bytes that the kubelet has allocated."""

    def nodes(self) -> tuple[VfioNode, ...]:
        """The nodes of all devices, each once, in the order of the devices."""
        return tuple({node.path: node for found in self.devices for node in found.nodes}.values())


class PodResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that the kubelet has allocated to one pod."""

    requests: tuple[DeviceRequest, ...] = ()
    cpu_ids: dict[str, tuple[int, ...]] = {}
    memory: dict[str, dict[str, int]] = {}
