"""What is true of a sandbox at one moment, as `state/` persists it and a later shim or `delete` reads it.

Containers and execs are persisted as they are, under the names of their fields in Pascal case: a field of another name
or type is a new version of the format (`state/schema.py`).
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.task import ExitStatus, Status, Stdio


class SandboxStatus(StrEnum):
    """Kata's words for a sandbox's state; CREATING is its empty string."""

    CREATING = ""
    READY = "ready"
    RUNNING = "running"
    STOPPED = "stopped"


class StreamPositions(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Bytes that have reached their reader: what a process took of its stdin, what its client took of its output."""

    stdin: int
    stdout: int
    stderr: int


NOTHING_MOVED = StreamPositions(stdin=0, stdout=0, stderr=0)


def moved_together(*positions: StreamPositions) -> StreamPositions:
    return StreamPositions(
        stdin=sum(each.stdin for each in positions),
        stdout=sum(each.stdout for each in positions),
        stderr=sum(each.stderr for each in positions),
    )


class ExecSnapshot(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """An added process; `spec` is its OCI process object until it is started: until then only the shim has it."""

    exec_id: ExecId = msgspec.field(name="ID")
    status: Status
    stdio: Stdio
    exit: ExitStatus | None = None
    moved: StreamPositions
    spec: Mapping[str, object]


class ContainerSnapshot(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    container_id: ContainerId = msgspec.field(name="ID")
    bundle: HostPath
    status: Status
    stdio: Stdio
    exit: ExitStatus | None = None
    rootfs: HostPath = HostPath("")
    moved: StreamPositions
    execs: tuple[ExecSnapshot, ...]
    annotations: Mapping[str, str]
    resources: Mapping[str, object]
    """`linux.resources` as last set: the VM's size is made of them."""
    device_maps: tuple[Mapping[str, object], ...]
    """Kata's DeviceMap objects; their ids are those of the sandbox's devices."""
    mounts: tuple[Mapping[str, object], ...]
    """Kata's Mount objects."""


class SandboxSnapshot(msgspec.Struct, frozen=True, kw_only=True):
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
    cgroups: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Its host cgroups: where, who is in them, what was set and why (`resources/cgroups/live.py`)."""
    owner: ContainerId | None = None
    """The container whose end is the sandbox's; None once it is deleted."""
    endpoints: tuple[Mapping[str, object], ...] = ()
    """Kata's Endpoint objects, one per network card."""
    devices: tuple[Mapping[str, object], ...] = ()
    """Kata's DeviceState objects."""
    sandbox_config: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Keys of Kata's SandboxConfig that this sandbox was started with, besides its hypervisor's."""
    trace: Mapping[str, object] = msgspec.field(default_factory=dict)
    """What took how long, from Create to the first output (`model/trace.py`)."""
