"""The guest's agent: its address, its requests and its replies, which `agent/translate.py` converts to protobuf."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.ids import GuestPath
from pyshim.model.volumes import FsGroup

AGENT_VSOCK_PORT = 1024


class VsockAddress(msgspec.Struct, frozen=True):
    cid: int
    port: int

    def __str__(self) -> str:
        return f"vsock://{self.cid}:{self.port}"


class HvsockAddress(msgspec.Struct, frozen=True):
    path: str
    port: int

    def __str__(self) -> str:
        return f"hvsock://{self.path}:{self.port}"


class SerialAddress(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"serial://{self.path}"


class UnixAddress(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


AgentAddress = VsockAddress | HvsockAddress | SerialAddress | UnixAddress


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


class CpuStats(msgspec.Struct, frozen=True, kw_only=True):
    total_ns: int
    user_ns: int
    kernel_ns: int
    per_cpu_ns: tuple[int, ...]
    periods: int
    throttled_periods: int
    throttled_ns: int


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    usage_bytes: int
    max_usage_bytes: int
    failures: int
    limit_bytes: int


class MemoryStats(msgspec.Struct, frozen=True, kw_only=True):
    cache_bytes: int
    usage: MemoryUse
    swap: MemoryUse
    kernel: MemoryUse
    detail: Mapping[str, int]
    """The lines of memory.stat: value by name."""


class BlockIoEntry(msgspec.Struct, frozen=True, kw_only=True):
    major: int
    minor: int
    op: str
    value: int


class BlockIoStats(msgspec.Struct, frozen=True, kw_only=True):
    """The fields have the names of the v1 blkio files. From a guest with cgroup v2 only the first two have entries."""

    service_bytes: tuple[BlockIoEntry, ...]
    serviced: tuple[BlockIoEntry, ...]
    queued: tuple[BlockIoEntry, ...]
    service_time: tuple[BlockIoEntry, ...]
    wait_time: tuple[BlockIoEntry, ...]
    merged: tuple[BlockIoEntry, ...]
    time: tuple[BlockIoEntry, ...]
    sectors: tuple[BlockIoEntry, ...]


class HugetlbStats(msgspec.Struct, frozen=True, kw_only=True):
    page_size: str
    usage_bytes: int
    max_usage_bytes: int
    failures: int


class ContainerStats(msgspec.Struct, frozen=True, kw_only=True):
    cpu: CpuStats
    memory: MemoryStats
    pids_current: int
    pids_limit: int
    """0: no limit."""
    block_io: BlockIoStats
    hugetlb: tuple[HugetlbStats, ...]
    oom_kills: int = 0
    """The number of OOM events that the agent has reported, which the shim counts."""


_NO_USE = MemoryUse(usage_bytes=0, max_usage_bytes=0, failures=0, limit_bytes=0)
NO_STATS = ContainerStats(
    cpu=CpuStats(total_ns=0, user_ns=0, kernel_ns=0, per_cpu_ns=(), periods=0, throttled_periods=0, throttled_ns=0),
    memory=MemoryStats(cache_bytes=0, usage=_NO_USE, swap=_NO_USE, kernel=_NO_USE, detail={}),
    pids_current=0,
    pids_limit=0,
    block_io=BlockIoStats(
        service_bytes=(), serviced=(), queued=(), service_time=(), wait_time=(), merged=(), time=(), sectors=()
    ),
    hugetlb=(),
)
"""The statistics of a container that uses nothing."""
