"""The requests to the guest's agent, before translation to its protobuf messages (agent/translate.py)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.ids import GuestPath
from pyshim.model.volumes import FsGroup


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Something the agent mounts: Kata's Storage message."""

    driver: str
    driver_options: tuple[str, ...]
    source: str
    fs_type: str
    options: tuple[str, ...]
    mount_point: GuestPath
    shared: bool = False
    """Stays until the sandbox ends, even after its container has ended."""
    fs_group: FsGroup | None = None


class GuestDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device the agent hands to a container: Kata's Device message."""

    id: str
    type: str
    vm_path: str
    container_path: str
    options: tuple[str, ...]


class KernelModule(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parameters: tuple[str, ...]


class GuestSandbox(msgspec.Struct, frozen=True, kw_only=True):
    sandbox_id: str
    hostname: str
    dns: tuple[str, ...]
    storages: tuple[Storage, ...]
    shared_pid_namespace: bool
    guest_hook_path: str
    kernel_modules: tuple[KernelModule, ...]


class GuestContainer(msgspec.Struct, frozen=True, kw_only=True):
    container_id: str
    spec: Mapping[str, Any]
    """The OCI spec (JSON object), already trimmed for the guest."""
    storages: tuple[Storage, ...]
    devices: tuple[GuestDevice, ...]
    shared_pid_namespace: bool


class NetworkAddress(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    prefix_length: int


class NetworkInterface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    addresses: tuple[NetworkAddress, ...]
    mtu: int
    mac: str
    flags: int
    type: str
    device_path: str
    """Guest PCI path when known, else empty (the agent then finds it by MAC)."""


class NetworkRoute(msgspec.Struct, frozen=True, kw_only=True):
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


class NetworkNeighbour(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    device: str
    mac: str
    state: int
    flags: int


class AgentDetails(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    memory_block_bytes: int
    supports_seccomp: bool
    storage_handlers: tuple[str, ...]
    device_handlers: tuple[str, ...]
    extra_features: tuple[str, ...]
