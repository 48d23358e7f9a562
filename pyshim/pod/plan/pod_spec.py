"""The spec that containerd would write for a pod's pause container, and the pod's files. Pure.

It has all that the sandbox's plan reads. So a pod of the Sandbox API is planned like one with a pause container.
Source: containerd 2.3, internal/cri/server/podsandbox/sandbox_run_linux.go.
"""

import json
import posixpath
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec.structs import replace

from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.oci import ANNOTATION_KEYS, Caller, ContainerKind, OciMount, OciSpec, parse_spec
from pyshim.model.sandbox import CreateSandbox, PodConfig, PodDns, SandboxRequest
from pyshim.pod.plan.guest_sandbox import unnamed_host
from pyshim.resources.sizing.plan.pod_figures import CONTAINERD_PREFIX

RESOLV_CONF, HOSTNAME, HOSTS = "/etc/resolv.conf", "/etc/hostname", "/etc/hosts"
_RUNTIMES_PREFIX = "io.kubernetes.cri"
"""The prefix of containerd's and CRI-O's own keys. Dropped from a pod's annotations: its author wrote them."""
_RUNTIMES_NAMES = "io.kubernetes."
"""The prefix of all names that containerd, CRI-O and the kubelet write."""
_RUNTIMES_KEYS = frozenset(key for keys in ANNOTATION_KEYS.values() for key in keys)
_NETWORK_SYSCTLS = {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0 2147483647"}
"""containerd's defaults for a pod with its own network: enable_unprivileged_ports, enable_unprivileged_icmp."""
_LOOPBACK = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_OPTIONS = ("rbind", "ro", "nosuid", "nodev", "noexec")


def pod_spec(request: CreateSandbox, pod: PodConfig, files: Mapping[str, HostPath]) -> OciSpec:
    """The spec of the sandbox of `pod`. Of `files`, it mounts what the sandbox itself needs."""
    linux: dict[str, Any] = {
        "namespaces": _namespaces(pod, request.netns_path),
        "cgroupsPath": _cgroups_path(pod.cgroup_parent, request.sandbox_id),
        "sysctl": {**({} if "network" in pod.host_namespaces else _NETWORK_SYSCTLS), **pod.sysctls},
    }
    raw = {
        "ociVersion": "1.1.0",
        "process": {"args": ["/pause"], "cwd": "/"},
        "root": {"path": "rootfs", "readonly": True},
        "hostname": _hostname(request.sandbox_id, pod),
        "mounts": [
            {"destination": RESOLV_CONF, "type": "bind", "source": files[RESOLV_CONF], "options": list(_OPTIONS)}
        ],
        "annotations": _annotations(request, pod),
        "linux": linux,
    }
    return parse_spec(json.dumps(raw).encode(), f"PodSandboxConfig of '{request.sandbox_id}'")


def let_through(request: SandboxRequest, patterns: Iterable[str]) -> SandboxRequest:
    """The request of a pod without its author's annotations that match none of the `patterns`.

    Both APIs of containerd may pass on all that the author wrote. The keys of the container runtime stay: it replaces
    those of the author. So do all annotations of a sandbox without a pod, whose caller is the node's operator.
    """
    if request.kind is not ContainerKind.POD_SANDBOX:
        return request
    allowed = (f"{_RUNTIMES_NAMES}*", *patterns)
    kept = {
        key: value
        for key, value in request.spec.annotations.items()
        if key in _RUNTIMES_KEYS or any(fnmatchcase(key, pattern) for pattern in allowed)
    }
    raw = {**request.spec.raw, "annotations": kept}
    return replace(request, spec=replace(request.spec, annotations=kept, raw=raw))


def pod_files(sandbox_id: SandboxId, pod: PodConfig, host_resolv_conf: bytes) -> Mapping[str, bytes]:
    """The contents of the pod's files by their paths in its containers. The kubelet replaces /etc/hosts."""
    return {
        RESOLV_CONF: _resolv_conf(pod.dns) if pod.dns is not None else host_resolv_conf,
        HOSTNAME: f"{_hostname(sandbox_id, pod)}\n".encode(),
        HOSTS: _LOOPBACK,
    }


def with_files(spec: OciSpec, files: Mapping[str, HostPath]) -> OciSpec:
    """The container's spec with the pod's `files`, except where it has a mount of its own.

    In a pod without a pause container, containerd leaves these mounts to the shim.
    """
    taken = {mount.destination for mount in spec.mounts}
    options = ("rbind", "ro") if (spec.raw.get("root") or {}).get("readonly") else ("rbind", "rw")
    added = [
        OciMount(destination=destination, type="bind", source=source, options=options)
        for destination, source in files.items()
        if destination not in taken
    ]
    raw = [
        {"destination": each.destination, "type": each.type, "source": each.source, "options": list(each.options)}
        for each in added
    ]
    mounts = [*(spec.raw.get("mounts") or ()), *raw]
    return replace(spec, mounts=(*spec.mounts, *added), raw={**spec.raw, "mounts": mounts})


def _hostname(sandbox_id: SandboxId, pod: PodConfig) -> str:
    return pod.hostname or unnamed_host(sandbox_id)


def _resolv_conf(dns: PodDns) -> bytes:
    lines = [f"nameserver {server}" for server in dns.servers]
    for word, values in (("search", dns.searches), ("options", dns.options)):
        lines += [f"{word} {' '.join(values)}"] if values else []
    return "".join(f"{line}\n" for line in lines).encode()


def _namespaces(pod: PodConfig, netns_path: str) -> list[dict[str, str]]:
    own = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount") if kind not in pod.host_namespaces]
    return own if "network" in pod.host_namespaces else [*own, {"type": "network", "path": netns_path}]


def _cgroups_path(parent: str, sandbox_id: SandboxId) -> str:
    """The sandbox's cgroup below the pod's `parent`; for a systemd slice in the form SLICE:PREFIX:NAME."""
    if not parent:
        return ""
    slice_name = posixpath.basename(parent)
    if slice_name.endswith(".slice"):
        return f"{slice_name}:cri-containerd:{sandbox_id}"
    return posixpath.join(parent, sandbox_id)


def _annotations(request: CreateSandbox, pod: PodConfig) -> dict[str, str]:
    keys = ANNOTATION_KEYS[Caller.CONTAINERD]
    own = {
        key: value
        for key, value in {**pod.annotations, **request.annotations}.items()
        if key not in _RUNTIMES_KEYS and not key.startswith(_RUNTIMES_PREFIX)
    }
    runtimes = {
        keys.container_type: "sandbox",
        keys.sandbox_id: request.sandbox_id,
        keys.pod_name: pod.name,
        keys.pod_namespace: pod.namespace,
        keys.pod_uid: pod.uid,
    }
    if (size := pod.resources) is not None:
        figures = {
            "cpu-period": size.cpu_period,
            "cpu-quota": size.cpu_quota,
            "cpu-shares": size.cpu_shares,
            "memory": size.memory_bytes,
        }
        runtimes |= {CONTAINERD_PREFIX + name: str(value) for name, value in figures.items()}
    return {**own, **runtimes}
