"""What the guest's agent is told, before translation to its protobuf messages (agent/translate.py)."""

from collections.abc import Mapping
from typing import Any

from pyshim.model.dataclasses import dataclass
from pyshim.model.ids import GuestPath
from pyshim.model.volumes import FsGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Something the agent mounts: Kata's Storage message."""

    driver: str
    driver_options: tuple[str, ...]
    source: str
    fs_type: str
    options: tuple[str, ...]
    mount_point: GuestPath
    shared: bool = False
    """Stays until the sandbox ends, whatever becomes of the container it came with."""
    fs_group: FsGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestDevice:
    """A device the agent hands to a container: Kata's Device message."""

    id: str
    type: str
    vm_path: str
    container_path: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModule:
    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSandbox:
    sandbox_id: str
    hostname: str
    dns: tuple[str, ...]
    storages: tuple[Storage, ...]
    shared_pid_namespace: bool
    guest_hook_path: str
    kernel_modules: tuple[KernelModule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestContainer:
    container_id: str
    spec: Mapping[str, Any]
    """The OCI spec (JSON object), already trimmed for the guest."""
    storages: tuple[Storage, ...]
    devices: tuple[GuestDevice, ...]
    shared_pid_namespace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAddress:
    address: str
    prefix_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    name: str
    addresses: tuple[NetworkAddress, ...]
    mtu: int
    mac: str
    flags: int
    type: str
    device_path: str
    """Guest PCI path when known, else empty (the agent then finds it by MAC)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRoute:
    destination: str
    """CIDR; empty for the default route."""
    gateway: str
    device: str
    source: str
    scope: int
    family: int
    """4 or 6."""
    flags: int
    mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNeighbour:
    address: str
    device: str
    mac: str
    state: int
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDetails:
    version: str
    memory_block_bytes: int
    memory_hotplug_probe: bool
    supports_seccomp: bool
    storage_handlers: tuple[str, ...]
    device_handlers: tuple[str, ...]
