"""Requests for a sandbox: with a pod's first container, or by containerd's Sandbox API."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.kind import ContainerKind
from pyshim.model.oci import OciSpec
from pyshim.model.task import ExitStatus, RuntimeOptions


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
