"""Which kind of container a spec describes, and the sandbox it belongs to.

Source: the CRI annotations of containerd and CRI-O; a spec without any is a single container (ctr, nerdctl, docker).
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, SandboxId, checked_id

_TYPE_KEYS = {
    "io.kubernetes.cri.container-type": "io.kubernetes.cri.sandbox-id",
    "io.kubernetes.cri-o.ContainerType": "io.kubernetes.cri-o.SandboxID",
    "io.kubernetes.docker.type": "io.kubernetes.sandbox.id",
}
_SANDBOX_VALUES = frozenset({"sandbox", "podsandbox"})


class ContainerKind(StrEnum):
    POD_SANDBOX = "pod_sandbox"
    POD_CONTAINER = "pod_container"
    SINGLE_CONTAINER = "single_container"


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A container's part in its sandbox: the sandbox itself, one of its containers, or its only one."""

    kind: ContainerKind
    sandbox_id: SandboxId


def membership(annotations: Mapping[str, str], container_id: ContainerId) -> Membership:
    """The container's kind and sandbox, as its annotations say.

    Raises InvalidArgument for an unknown type or a pod container without a sandbox.
    """
    for type_key, sandbox_key in _TYPE_KEYS.items():
        value = annotations.get(type_key)
        if value is None:
            continue
        if value in _SANDBOX_VALUES:
            return Membership(kind=ContainerKind.POD_SANDBOX, sandbox_id=SandboxId(container_id))
        if value != "container":
            raise InvalidArgument(f"read annotation '{type_key}': unknown container type {value[:100]!r}")
        sandbox_id = annotations.get(sandbox_key, "")
        if not sandbox_id:
            raise InvalidArgument(f"read annotation '{sandbox_key}': container '{container_id}' names no sandbox")
        return Membership(
            kind=ContainerKind.POD_CONTAINER,
            sandbox_id=SandboxId(checked_id(sandbox_id, f"annotation '{sandbox_key}'")),
        )
    return Membership(kind=ContainerKind.SINGLE_CONTAINER, sandbox_id=SandboxId(container_id))
