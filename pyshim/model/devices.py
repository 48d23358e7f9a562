"""The devices of a pod: what is asked for, by whom, and what that is on this host."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pyshim.model.dataclasses import dataclass

VFIO_DIR = "/dev/vfio/"
VFIO_CONTAINER = "/dev/vfio/vfio"
"""The node every VFIO program opens first: no device of its own."""
IOMMUFD_DIR = "/dev/vfio/devices/"


def is_vfio_node(path: str) -> bool:
    """Whether `path` is the node of an IOMMU group or of one function."""
    return path.startswith(VFIO_DIR) and path != VFIO_CONTAINER


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    name: str
    """Qualified CDI name."""
    origin: str
    """Who asked, for the log."""
    container: str = ""
    """The container's name in the pod; empty where the asker named none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceQuestion:
    """What to find out about a sandbox's or a container's devices."""

    pod_name: str = ""
    pod_namespace: str = ""
    kubelet_socket: str = ""
    """Ask the kubelet there what the pod was given; empty: do not."""
    requests: tuple[DeviceRequest, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those that ask for devices, `cdi.k8s.io/...`."""
    nodes: tuple[str, ...] = ()
    """VFIO nodes that a spec has already."""
    names_only: bool = False
    """The devices are not of this host: who asked for what is the whole answer."""

    @property
    def is_empty(self) -> bool:
        return not (self.kubelet_socket or self.requests or self.annotations or self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunction:
    """One PCI function of this host."""

    address: str
    vendor: str
    device: str
    class_code: str
    """The last three as sysfs has them: `0x10de`, `0x2331`, `0x030200`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VfioNode:
    """What opens functions to a VM: an IOMMU group's node with all its functions, or one function's own node."""

    path: str
    functions: tuple[HostFunction, ...]

    @property
    def iommufd(self) -> bool:
        return self.path.startswith(IOMMUFD_DIR)

    @property
    def number(self) -> str:
        """N of `/dev/vfio/N` and of `/dev/vfio/devices/vfioN`."""
        return self.path.rpartition("/")[2].removeprefix("vfio")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    request: DeviceRequest
    """With an empty name for a node that a spec has already."""
    nodes: tuple[VfioNode, ...]
    env: tuple[str, ...] = ()
    """What the device's spec sets in a container."""
    left_out: tuple[str, ...] = ()
    """What else the spec does to a container on this host, in words; none of it reaches a guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    devices: tuple[FoundDevice, ...] = ()
    cpu_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Exclusive CPUs by container, as the kubelet gave them."""
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by NUMA nodes (`0`, `0,1`), by container."""

    def nodes(self) -> tuple[VfioNode, ...]:
        """Each node once, in the order of the devices."""
        return tuple({node.path: node for found in self.devices for node in found.nodes}.values())


def as_json(value: Any) -> Any:
    """The nouns of this module as JSON; `from_json` reads it back."""
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def question_from_json(data: Mapping[str, Any]) -> DeviceQuestion:
    return DeviceQuestion(
        pod_name=data["pod_name"],
        pod_namespace=data["pod_namespace"],
        kubelet_socket=data["kubelet_socket"],
        requests=tuple(DeviceRequest(**item) for item in data["requests"]),
        annotations=dict(data["annotations"]),
        nodes=tuple(data["nodes"]),
        names_only=data["names_only"],
    )


def devices_from_json(data: Mapping[str, Any]) -> PodDevices:
    return PodDevices(
        devices=tuple(
            FoundDevice(
                request=DeviceRequest(**item["request"]),
                nodes=tuple(
                    VfioNode(path=node["path"], functions=tuple(HostFunction(**each) for each in node["functions"]))
                    for node in item["nodes"]
                ),
                env=tuple(item["env"]),
                left_out=tuple(item["left_out"]),
            )
            for item in data["devices"]
        ),
        cpu_ids={name: tuple(ids) for name, ids in data["cpu_ids"].items()},
        memory={name: dict(sizes) for name, sizes in data["memory"].items()},
    )
