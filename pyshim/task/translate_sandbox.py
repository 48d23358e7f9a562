"""containerd's Sandbox messages to model values and back. Bad input is refused; nothing is decided here."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from protos.containerd import sandbox_pb2 as pb
from protos.containerd import types_pb2
from protos.cri import pod_sandbox_pb2 as cri
from pyshim.model.architecture import go_architecture
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.ids import SandboxId, checked_id
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns, PodResourceSums, SandboxReport
from pyshim.model.task import ExitStatus
from pyshim.task.translate import absolute_path, json_object, linux_resources, parsed, timestamp, type_name, uint32

_POD_CONFIG = "runtime.v1.PodSandboxConfig"
_SPEC = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_NEW_RESOURCES = "updated-resources"
"""The extension of containerd's sandbox with the limits of the pod that the kubelet has changed."""
_NEW_RESOURCES_TYPE = "io.containerd.cri.v1/UpdatedResources"
_CRI_RESOURCES = {
    "cpu_period": ("cpu", "period"),
    "cpu_quota": ("cpu", "quota"),
    "cpu_shares": ("cpu", "shares"),
    "memory_limit_in_bytes": ("memory", "limit"),
}
"""The members of the CRI's LinuxContainerResources that a pod has, and OCI's for them."""


class SandboxRef(NamedTuple):
    """A request that only names a sandbox."""

    sandbox_id: SandboxId


class StatusRequest(NamedTuple):
    sandbox_id: SandboxId
    verbose: bool


class SandboxUpdate(NamedTuple):
    sandbox_id: SandboxId
    resources: Mapping[str, Any]


class Measured(NamedTuple):
    """The sandbox's metrics, and when they were taken."""

    sandbox_id: SandboxId
    metrics: AnyMessage
    at_ns: int


def sandbox_ref(payload: bytes) -> SandboxRef:
    """The sandbox of a request whose other fields, if any, are ignored; the id is field 1 of all of them."""
    return SandboxRef(_sandbox_id(parsed(pb.PingRequest, payload).sandbox_id))


def create_request(payload: bytes) -> CreateSandbox:
    request = parsed(pb.CreateSandboxRequest, payload)
    sandbox_id = _sandbox_id(request.sandbox_id)
    if request.netns_path:
        absolute_path(request.netns_path, f"network namespace of sandbox {sandbox_id!r}")
    return CreateSandbox(
        sandbox_id=sandbox_id,
        bundle=absolute_path(request.bundle_path, f"bundle of sandbox {sandbox_id!r}"),
        netns_path=request.netns_path,
        annotations=dict(request.annotations),
        pod=_pod_config(request.options, sandbox_id),
    )


def status_request(payload: bytes) -> StatusRequest:
    request = parsed(pb.SandboxStatusRequest, payload)
    return StatusRequest(_sandbox_id(request.sandbox_id), request.verbose)


def update_request(payload: bytes) -> SandboxUpdate:
    """The limits of the pod, from OCI's resources or from the sandbox that containerd 2.4 sends.

    Raises Unimplemented, which containerd tolerates, when anything else has changed: nothing else has an effect.
    """
    request = parsed(pb.UpdateSandboxRequest, payload)
    sandbox_id = _sandbox_id(request.sandbox_id)
    if not request.HasField("sandbox"):
        return SandboxUpdate(sandbox_id, linux_resources(request, f"sandbox {sandbox_id!r}"))
    changed = ", ".join(request.fields)
    found = request.sandbox.extensions.get(_NEW_RESOURCES)
    if found is None or not {"extensions", f"extensions.{_NEW_RESOURCES}"}.issuperset(request.fields):
        raise Unimplemented(f"update sandbox {sandbox_id!r}: no resources among what has changed ({changed or 'all'})")
    what = f"extension {_NEW_RESOURCES!r} of sandbox {sandbox_id!r}"
    update = json_object(found, _NEW_RESOURCES_TYPE, what)
    return SandboxUpdate(sandbox_id, _oci_resources(update.get("Resources") or {}, what))


def _oci_resources(cri_resources: Any, what: str) -> Mapping[str, Any]:
    """The CRI's limits as OCI's LinuxResources; a limit that is absent or 0 stays as it is."""
    if not isinstance(cri_resources, dict):
        raise InvalidArgument(f"decode {what}: 'Resources' is not a JSON object")
    resources: dict[str, dict[str, int]] = {}
    for name, (group, member) in _CRI_RESOURCES.items():
        value = cri_resources.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgument(f"decode {what}: {name} is not an integer")
        if value:
            resources.setdefault(group, {})[member] = value
    return resources


def start_reply(state: SandboxReport) -> bytes:
    """The reply includes the spec, which containerd passes to its NRI plugins."""
    spec = AnyMessage(type_url=_SPEC, value=json.dumps(state.spec).encode())
    return pb.StartSandboxResponse(
        pid=state.pid, created_at=timestamp(state.created_at_ns), spec=spec
    ).SerializeToString()


def platform_reply(machine: str) -> bytes:
    platform = types_pb2.Platform(os="linux", architecture=go_architecture(machine))
    return pb.PlatformResponse(platform=platform).SerializeToString()


def wait_reply(exit_status: ExitStatus) -> bytes:
    return pb.WaitSandboxResponse(
        exit_status=uint32(exit_status.status), exited_at=timestamp(exit_status.exited_at_ns)
    ).SerializeToString()


def status_reply(state: SandboxReport) -> bytes:
    """The state is one of the CRI's names, with which containerd compares it."""
    reply = pb.SandboxStatusResponse(
        sandbox_id=state.sandbox_id,
        pid=state.pid,
        state="SANDBOX_READY" if state.is_ready else "SANDBOX_NOTREADY",
        info=state.info,
        created_at=timestamp(state.created_at_ns),
    )
    if state.exit is not None:
        reply.exited_at.CopyFrom(timestamp(state.exit.exited_at_ns))
    return reply.SerializeToString()


def metrics_reply(measured: Measured) -> bytes:
    metric = types_pb2.Metric(id=measured.sandbox_id, data=measured.metrics, timestamp=timestamp(measured.at_ns))
    return pb.SandboxMetricsResponse(metrics=metric).SerializeToString()


def _sandbox_id(text: str) -> SandboxId:
    return SandboxId(checked_id(text, "sandbox id"))


def _pod_config(options: AnyMessage, sandbox_id: SandboxId) -> PodConfig | None:
    """The pod of the options; None without options. Raises InvalidArgument for options of another type."""
    name = type_name(options)
    if not name:
        return None
    action = f"create sandbox {sandbox_id!r}"
    if name != _POD_CONFIG:
        raise InvalidArgument(f"{action}: the options are of type {name[:100]!r}, not {_POD_CONFIG!r}")

    try:
        config = cri.PodSandboxConfig.FromString(options.value)
    except DecodeError as error:
        raise InvalidArgument(f"{action}: decode {_POD_CONFIG}: {error}") from error
    linux, metadata = config.linux, config.metadata
    namespaces = linux.security_context.namespace_options
    if namespaces.HasField("userns_options") and namespaces.userns_options.mode == cri.NamespaceMode.POD:
        raise Unimplemented(
            f"{action}: a pod in a VM has no user namespace of the host (hint: leave out 'hostUsers: false')"
        )
    modes = {"network": namespaces.network, "pid": namespaces.pid, "ipc": namespaces.ipc}
    resources, dns = linux.resources, config.dns_config
    return PodConfig(
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        hostname=config.hostname,
        dns=PodDns(servers=tuple(dns.servers), searches=tuple(dns.searches), options=tuple(dns.options))
        if config.HasField("dns_config")
        else None,
        annotations=dict(config.annotations),
        cgroup_parent=linux.cgroup_parent,
        sysctls=dict(linux.sysctls),
        resources=PodResourceSums(
            cpu_period=resources.cpu_period,
            cpu_quota=resources.cpu_quota,
            cpu_shares=resources.cpu_shares,
            memory_bytes=resources.memory_limit_in_bytes,
        )
        if linux.HasField("resources")
        else None,
        host_namespaces=frozenset(kind for kind, mode in modes.items() if mode == cri.NamespaceMode.NODE),
    )
