"""A sandbox as it is at one moment: `state/` persists it, `delete`, `cleanup` and the operator's command read it.

The classes are persisted as they are, under the names of their fields in Pascal case. A field of another name or type
is a new version of the format (`state/schema.py`).
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.task import ExitStatus, Status, Stdio


class SandboxStatus(StrEnum):
    """Kata's words for a sandbox's state; CREATING is its empty string."""

    CREATING = ""
    READY = "ready"
    RUNNING = "running"
    STOPPED = "stopped"


class ContainerSnapshot(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    container_id: ContainerId = msgspec.field(name="ID")
    bundle: HostPath
    status: Status
    stdio: Stdio
    exit: ExitStatus | None = None
    rootfs: HostPath = HostPath("")
    annotations: Mapping[str, str]
    resources: Mapping[str, object]
    """`linux.resources` as last set: the VM's size is made of them."""
    device_maps: tuple[Mapping[str, object], ...]
    """Kata's DeviceMap objects; their ids are those of the sandbox's devices."""
    mounts: tuple[Mapping[str, object], ...]
    """Kata's Mount objects."""


class SandboxSnapshot(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    sandbox_id: SandboxId = msgspec.field(name="SandboxID")
    status: SandboxStatus
    config_source: str
    hypervisor_type: str
    hypervisor: Mapping[str, object]
    """Kata's HypervisorState: pid, uuid, sockets; empty before the VM exists."""
    hypervisor_config: Mapping[str, object]
    """Kata's HypervisorConfig keys that this sandbox was started with."""
    vmm_pid: int
    agent_address: str
    netns_path: str
    sizing: Mapping[str, object]
    containers: tuple[ContainerSnapshot, ...]
    failure: str
    """Why the sandbox died; empty while it has not."""
    cgroups: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Its host cgroups: their places, processes and settings, with the reasons (`resources/cgroups/live.py`)."""
    owner: ContainerId | None = None
    """The container whose end ends the sandbox; None once it is deleted, and in a pod without a pause container."""
    pod: str = ""
    """The pod's namespace and name, `default/web`."""
    endpoints: tuple[Mapping[str, object], ...] = ()
    """Kata's Endpoint objects, one per network card."""
    devices: tuple[Mapping[str, object], ...] = ()
    """Kata's DeviceState objects."""
    sandbox_config: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Keys of Kata's SandboxConfig that this sandbox was started with, besides its hypervisor's."""
    origin: str = ""
    """`booted`, of a remote VM `booted as` and its type, or `cloned from` and the key of its template."""
    trace: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The spans from Create to the first output (`model/trace.py`)."""
