"""What is true of a sandbox at one moment, as `state/` persists it and a later shim or `delete` reads it."""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import NamedTuple

from pyshim.model.dataclasses import dataclass
from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.task import ExitStatus, Status, Stdio


class SandboxStatus(StrEnum):
    """Kata's words for a sandbox's state; CREATING is its empty string."""

    CREATING = ""
    READY = "ready"
    RUNNING = "running"
    STOPPED = "stopped"


class StreamPositions(NamedTuple):
    """Bytes that have reached their reader: what a process took of its stdin, what its client took of its output."""

    stdin: int = 0
    stdout: int = 0
    stderr: int = 0


NOTHING_MOVED = StreamPositions()


class ExecSnapshot(NamedTuple):
    """An added process; `spec` is its OCI process object until it is started, for then nobody else has it."""

    exec_id: ExecId
    status: Status
    stdio: Stdio
    exit: ExitStatus | None
    moved: StreamPositions
    spec: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSnapshot:
    container_id: ContainerId
    bundle: HostPath
    status: Status
    stdio: Stdio
    exit: ExitStatus | None
    rootfs: HostPath
    moved: StreamPositions = NOTHING_MOVED
    execs: tuple[ExecSnapshot, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, object] = field(default_factory=dict)
    """`linux.resources` as last set: the VM's size is made of them."""
    device_maps: tuple[Mapping[str, object], ...] = ()
    """Kata's DeviceMap objects; their ids are those of the sandbox's devices."""
    mounts: tuple[Mapping[str, object], ...] = ()
    """Kata's Mount objects."""


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
    owner: ContainerId | None = None
    """The container whose end is the sandbox's; None once it is deleted."""
    endpoints: tuple[Mapping[str, object], ...] = ()
    """Kata's Endpoint objects, one per network card."""
    devices: tuple[Mapping[str, object], ...] = ()
    """Kata's DeviceState objects."""
    sandbox_config: Mapping[str, object] = field(default_factory=dict)
    """Keys of Kata's SandboxConfig that this sandbox was started with, besides its hypervisor's."""
    trace: Mapping[str, object] = field(default_factory=dict)
    """What took how long, from Create to the first output (`model/trace.py`)."""
