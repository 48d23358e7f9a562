"""What is true of a sandbox at one moment, as `state/` persists it and a later shim or `delete` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.task import ExitStatus, Status, Stdio


class SandboxStatus(StrEnum):
    """Kata's words for a sandbox's state; CREATING is its empty string."""

    CREATING = ""
    READY = "ready"
    RUNNING = "running"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSnapshot:
    container_id: ContainerId
    bundle: HostPath
    status: Status
    stdio: Stdio
    exit: ExitStatus | None
    rootfs: HostPath


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSnapshot:
    sandbox_id: SandboxId
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
    cgroups: Mapping[str, object] = field(default_factory=dict)
    """Its host cgroups: where, who is in them, what was set and why (`sandbox/cgroups.py`)."""
