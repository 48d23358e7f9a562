"""A sandbox: its phases, the requests for one, the report on one, and its persisted state."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import ContainerKind, OciSpec
from pyshim.model.task import ExitStatus, RuntimeOptions, Status, Stdio


class Phase(StrEnum):
    """A sandbox's phase. `pod/life.py` has the table of the steps from one to the next."""

    NEW = "new"
    """Nothing of it is on the host."""
    OPENING = "opening"
    RUNNING = "running"
    """The VM runs, and its agent has the sandbox."""
    ENDING = "ending"
    ENDED = "ended"
    """Only its state is on the host, and what could not be undone. It is never opened again."""


class EndedBy(StrEnum):
    """What ended a sandbox, or has begun to."""

    OWNER = "owner"
    """The container that it was made with has ended or was deleted."""
    STOP = "stop"
    """StopSandbox."""
    LOST = "lost"
    """The VM, virtiofsd or the agent is gone, or the guest hangs."""
    SHUTDOWN = "shutdown"
    """The shim ends."""
    FAILED = "failed"
    """It could not be opened, or its owner not created."""


class SandboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox to create. The Sandbox API has no spec: the shim then writes one from the pod's configuration."""

    sandbox_id: SandboxId
    kind: ContainerKind
    spec: OciSpec
    options: RuntimeOptions | None
    files: Mapping[str, HostPath] = {}
    """Host files to mount into every container whose spec has no mount there, by their paths in the container."""


class PodDns(msgspec.Struct, frozen=True, kw_only=True):
    servers: tuple[str, ...]
    searches: tuple[str, ...]
    options: tuple[str, ...]


class PodResourceSums(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over a pod's containers, as in the CRI; 0: absent."""

    cpu_period: int
    cpu_quota: int
    cpu_shares: int
    memory_bytes: int


class PodConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's description of a pod (`runtime.v1.PodSandboxConfig`), without the fields for network plugins."""

    name: str
    namespace: str
    uid: str
    hostname: str
    dns: PodDns | None
    """None: the pod uses the host's."""
    annotations: Mapping[str, str]
    """The annotations of the pod's manifest."""
    cgroup_parent: str
    sysctls: Mapping[str, str]
    resources: PodResourceSums | None
    host_namespaces: frozenset[str]
    """The namespaces of the host that the pod requests: `network`, `pid`, `ipc`."""


class CreateSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """The request of containerd's Sandbox API. Without `pod` the bundle has a spec."""

    sandbox_id: SandboxId
    bundle: HostPath
    netns_path: str
    """Empty: the host's network."""
    annotations: Mapping[str, str]
    pod: PodConfig | None


class SandboxReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to SandboxStatus."""

    sandbox_id: SandboxId
    pid: int
    """The VMM's pid, or the shim's for a remote VM; 0 before the VM runs."""
    is_ready: bool
    created_at_ns: int
    exit: ExitStatus | None
    info: Mapping[str, str]
    """Further details for people, if the request asks for them."""
    spec: Mapping[str, Any]
    """The JSON object; empty before the VM runs."""


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
    """As Kata shows `phase`; RUNNING once a container runs."""
    phase: Phase | None = None
    """None in the states of older releases."""
    ended_by: EndedBy | None = None
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
    """The container whose end ends the sandbox; None in a pod of the Sandbox API."""
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
    """The saved spans (`model/observation.py`)."""
