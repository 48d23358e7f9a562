"""The container runtime that wrote a spec, and the keys of its annotations: no other runtime's keys are read.

A pod's own annotations stand in the spec beside its runtime's. containerd writes its own over them. CRI-O writes a
pod's annotations over its own in the spec of the sandbox, and the labels last: so a pod's names are read from the
labels that the kubelet sets, which a pod cannot change. Source: CRI-O 1.36, server/sandbox_run_linux.go.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pyshim.model.errors import InvalidArgument


class Caller(StrEnum):
    CRI_O = "CRI-O"
    CONTAINERD = "containerd"
    CRI_DOCKERD = "cri-dockerd"


class CallerKeys(NamedTuple):
    """The annotation that holds each of these; empty where the runtime writes none."""

    container_type: str
    sandbox_id: str
    pod_name: str
    pod_namespace: str
    pod_uid: str
    container_name: str
    image_name: str
    name_of_sandbox: str = ""
    """`container_name` of a sandbox itself, which its pod cannot change."""
    host_network: str = ""
    """"true" for a pod on the host's network, whose namespace CRI-O names by a path of its own."""


class PodName(msgspec.Struct, frozen=True):
    """A pod's name in Kubernetes; empty for a sandbox without a pod."""

    name: str = ""
    namespace: str = ""
    uid: str = ""


_KUBELETS_LABELS = (
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.pod.uid",
    "io.kubernetes.container.name",
)
KEYS: Mapping[Caller, CallerKeys] = {
    Caller.CRI_O: CallerKeys(
        "io.kubernetes.cri-o.ContainerType",
        "io.kubernetes.cri-o.SandboxID",
        *_KUBELETS_LABELS,
        "io.kubernetes.cri-o.ImageName",
        name_of_sandbox="POD",
        host_network="io.kubernetes.cri-o.HostNetwork",
    ),
    Caller.CONTAINERD: CallerKeys(
        container_type="io.kubernetes.cri.container-type",
        sandbox_id="io.kubernetes.cri.sandbox-id",
        pod_name="io.kubernetes.cri.sandbox-name",
        pod_namespace="io.kubernetes.cri.sandbox-namespace",
        pod_uid="io.kubernetes.cri.sandbox-uid",
        container_name="io.kubernetes.cri.container-name",
        image_name="io.kubernetes.cri.image-name",
    ),
    Caller.CRI_DOCKERD: CallerKeys(
        "io.kubernetes.docker.type", "io.kubernetes.sandbox.id", *_KUBELETS_LABELS, "", "POD"
    ),
}


def caller_of(annotations: Mapping[str, str]) -> Caller:
    """The runtime whose container type is there; containerd without one (ctr, nerdctl).

    Raises InvalidArgument for the types of two runtimes: one of them is the pod's own.
    """
    found = [caller for caller, keys in KEYS.items() if keys.container_type in annotations]
    if len(found) > 1:
        names = " and ".join(f"'{KEYS[caller].container_type}'" for caller in found)
        raise InvalidArgument(f"read annotations {names}: they are of two container runtimes")
    return found[0] if found else Caller.CONTAINERD


def keys_of(annotations: Mapping[str, str]) -> CallerKeys:
    """The keys of the runtime that wrote `annotations`. Raises what `caller_of` does."""
    return KEYS[caller_of(annotations)]


def pod_of(annotations: Mapping[str, str]) -> PodName:
    """The pod, as the runtime that wrote `annotations` names it. Raises what `caller_of` does."""
    keys = keys_of(annotations)
    return PodName(*(annotations.get(key, "") for key in (keys.pod_name, keys.pod_namespace, keys.pod_uid)))


def container_name(annotations: Mapping[str, str]) -> str:
    """The container's name in its pod; empty outside one. Raises what `caller_of` does."""
    return annotations.get(keys_of(annotations).container_name, "")
