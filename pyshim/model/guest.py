"""The values of the agent's requests and replies, which `agent/translate.py` converts to and from protobuf."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.ids import GuestPath
from pyshim.model.volumes import FsGroup


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """A mount that the agent makes in the guest: Kata's Storage message."""

    driver: str
    driver_options: tuple[str, ...]
    source: str
    fs_type: str
    options: tuple[str, ...]
    mount_point: GuestPath
    shared: bool = False
    """It stays mounted until the sandbox ends, not only until its container ends."""
    fs_group: FsGroup | None = None


class GuestDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the agent gives to a container: Kata's Device message."""

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
    """The OCI spec as a JSON object, adapted to the guest."""
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
    """The guest PCI path; empty if it is not known: the agent then finds the device by its MAC."""


class NetworkRoute(msgspec.Struct, frozen=True, kw_only=True):
    destination: str
    """In CIDR notation; empty for the default route."""
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
