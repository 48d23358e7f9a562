"""A sandbox as it is asked for: with a pod's first container, or by containerd's Sandbox API."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.kind import ContainerKind
from pyshim.model.oci import OciSpec
from pyshim.model.task import ExitStatus, RuntimeOptions

_NO_FILES: Mapping[str, HostPath] = {}


class SandboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A VM to make, by the spec of the container it is made for, or by one written from a pod's configuration."""

    sandbox_id: SandboxId
    kind: ContainerKind
    spec: OciSpec
    options: RuntimeOptions | None
    files: Mapping[str, HostPath] = _NO_FILES
    """By their paths in the pod's containers: files that each of them has, unless its spec has its own."""


class PodDns(msgspec.Struct, frozen=True, kw_only=True):
    servers: tuple[str, ...]
    searches: tuple[str, ...]
    options: tuple[str, ...]


class PodResourceSums(msgspec.Struct, frozen=True, kw_only=True):
    """The sum over a pod's containers, as in the CRI; 0 for a figure that is absent."""

    cpu_period: int
    cpu_quota: int
    cpu_shares: int
    memory_bytes: int


class PodConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the kubelet describes it (`runtime.v1.PodSandboxConfig`), without what the network plugins need."""

    name: str
    namespace: str
    uid: str
    hostname: str
    dns: PodDns | None
    """None for the host's."""
    annotations: Mapping[str, str]
    """The pod's own, of its author."""
    cgroup_parent: str
    sysctls: Mapping[str, str]
    resources: PodResourceSums | None
    host_namespaces: frozenset[str]
    """Of `network`, `pid` and `ipc`: those of the host, as the pod asks for."""


class CreateSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """containerd's request. Without `pod` the bundle has a spec."""

    sandbox_id: SandboxId
    bundle: HostPath
    netns_path: str
    """Empty for the host's network."""
    annotations: Mapping[str, str]
    pod: PodConfig | None


class SandboxReport(msgspec.Struct, frozen=True, kw_only=True):
    """A SandboxStatus answer."""

    sandbox_id: SandboxId
    pid: int
    """The VMM's, or the shim's for a VM that is not on this host; 0 before the VM runs."""
    is_ready: bool
    created_at_ns: int
    exit: ExitStatus | None
    info: Mapping[str, str]
    """For people, where they ask for more."""
    spec: Mapping[str, Any]
    """As JSON has it; empty before the VM runs."""
