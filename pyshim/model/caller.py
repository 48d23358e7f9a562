"""The container runtime that wrote a spec, and the annotation keys under which it describes pod and container.

A spec holds the runtime's annotations and the pod's own in one table, so only the keys of that one runtime are read.
containerd's annotations replace a pod's of the same key. CRI-O lets a pod's annotations replace its own in the spec of
the sandbox, but not the kubelet's labels, from which the pod's names are read. Source: CRI-O 1.36,
server/sandbox_run_linux.go.
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


class AnnotationKeys(NamedTuple):
    """One runtime's key for each of these; empty where it has none."""

    container_type: str
    sandbox_id: str
    pod_name: str
    pod_namespace: str
    pod_uid: str
    container_name: str
    image_name: str = ""
    host_network: str = ""
    """Its value is "true" for a pod on the host's network. CRI-O needs it: its specs name that namespace by a path."""
    sandbox_container_name: str = ""
    """Not a key: the value of `container_name` in a sandbox's own spec, where the pod cannot change it."""


_KUBELET_LABELS = {
    "pod_name": "io.kubernetes.pod.name",
    "pod_namespace": "io.kubernetes.pod.namespace",
    "pod_uid": "io.kubernetes.pod.uid",
    "container_name": "io.kubernetes.container.name",
    "sandbox_container_name": "POD",
}
ANNOTATION_KEYS: Mapping[Caller, AnnotationKeys] = {
    Caller.CRI_O: AnnotationKeys(
        container_type="io.kubernetes.cri-o.ContainerType",
        sandbox_id="io.kubernetes.cri-o.SandboxID",
        image_name="io.kubernetes.cri-o.ImageName",
        host_network="io.kubernetes.cri-o.HostNetwork",
        **_KUBELET_LABELS,
    ),
    Caller.CONTAINERD: AnnotationKeys(
        container_type="io.kubernetes.cri.container-type",
        sandbox_id="io.kubernetes.cri.sandbox-id",
        pod_name="io.kubernetes.cri.sandbox-name",
        pod_namespace="io.kubernetes.cri.sandbox-namespace",
        pod_uid="io.kubernetes.cri.sandbox-uid",
        container_name="io.kubernetes.cri.container-name",
        image_name="io.kubernetes.cri.image-name",
    ),
    Caller.CRI_DOCKERD: AnnotationKeys(
        container_type="io.kubernetes.docker.type", sandbox_id="io.kubernetes.sandbox.id", **_KUBELET_LABELS
    ),
}


def caller_of(annotations: Mapping[str, str]) -> Caller:
    """The runtime whose `container_type` key is present; containerd if none is (ctr, nerdctl).

    Raises InvalidArgument if the keys of two runtimes are present: the pod has set one of them.
    """
    found = [caller for caller, keys in ANNOTATION_KEYS.items() if keys.container_type in annotations]
    if len(found) > 1:
        names = " and ".join(f"'{ANNOTATION_KEYS[caller].container_type}'" for caller in found)
        raise InvalidArgument(f"read annotations {names}: they are of two container runtimes")
    return found[0] if found else Caller.CONTAINERD


def keys_of(annotations: Mapping[str, str]) -> AnnotationKeys:
    """The keys of the runtime that wrote `annotations`. Raises as `caller_of`."""
    return ANNOTATION_KEYS[caller_of(annotations)]


class PodName(msgspec.Struct, frozen=True):
    """A pod's identity in Kubernetes; all fields are empty for a sandbox that is not a pod."""

    name: str = ""
    namespace: str = ""
    uid: str = ""


def pod_of(annotations: Mapping[str, str]) -> PodName:
    """The pod that the annotations of a spec name. Raises as `caller_of`."""
    keys = keys_of(annotations)
    return PodName(
        name=annotations.get(keys.pod_name, ""),
        namespace=annotations.get(keys.pod_namespace, ""),
        uid=annotations.get(keys.pod_uid, ""),
    )


def container_name(annotations: Mapping[str, str]) -> str:
    """The container's name in its pod; empty for a container without a pod. Raises as `caller_of`."""
    return annotations.get(keys_of(annotations).container_name, "")
