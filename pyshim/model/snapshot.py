"""The persisted state of a sandbox. `state/` writes it; `delete`, `cleanup` and the command `pyshim` read it.

The fields are written under their names in Pascal case. To rename a field or change its type, increase the version of
the format (`state/schema.py`).
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.task import ExitStatus, Status, Stdio


class SandboxStatus(StrEnum):
    """Kata's names of a sandbox's states, of which the first is an empty text."""

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
    """The latest `linux.resources`, from which the VM's size is computed."""
    device_maps: tuple[Mapping[str, object], ...]
    """Kata's DeviceMap objects, with the ids of `SandboxSnapshot.devices`."""
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
    """Kata's HypervisorConfig with which the sandbox was started."""
    vmm_pid: int
    agent_address: str
    netns_path: str
    sizing: Mapping[str, object]
    containers: tuple[ContainerSnapshot, ...]
    failure: str
    """Why the sandbox failed; empty if it has not."""
    cgroups: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The host cgroups with their paths, processes, settings and the reasons (`resources/cgroups/live.py`)."""
    owner: ContainerId | None = None
    """The container whose end ends the sandbox; None after its deletion, and in a pod without a pause container."""
    pod: str = ""
    """The pod's namespace and name: `default/web`."""
    endpoints: tuple[Mapping[str, object], ...] = ()
    """Kata's Endpoint objects, one for each network interface."""
    devices: tuple[Mapping[str, object], ...] = ()
    """Kata's DeviceState objects."""
    sandbox_config: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Kata's SandboxConfig with which the sandbox was started, without the hypervisor's part."""
    origin: str = ""
    """`booted`; for a remote VM `booted as TYPE`; or `cloned from KEY`, the template's key."""
    trace: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The saved spans (`model/trace.py`)."""
