"""A container's kind and its sandbox, read from the annotations of its spec.

Source: the CRI annotations of containerd and CRI-O. A spec without any is that of a single container (ctr, nerdctl).
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.caller import keys_of
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, SandboxId, checked_id

_SANDBOX_VALUES = frozenset({"sandbox", "podsandbox"})


class ContainerKind(StrEnum):
    POD_SANDBOX = "pod_sandbox"
    POD_CONTAINER = "pod_container"
    SINGLE_CONTAINER = "single_container"


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    kind: ContainerKind
    sandbox_id: SandboxId
    """The container's own id unless it is a POD_CONTAINER."""


def membership(annotations: Mapping[str, str], container_id: ContainerId) -> Membership:
    """The container's kind and the sandbox that it belongs to.

    Raises InvalidArgument for an unknown container type, for the keys of two runtimes, for a pod container without a
    sandbox id, and for a sandbox that poses as a pod container: under CRI-O a pod's annotations may replace the type.
    """
    keys = keys_of(annotations)
    value = annotations.get(keys.container_type)
    if value is None:
        return Membership(kind=ContainerKind.SINGLE_CONTAINER, sandbox_id=SandboxId(container_id))
    if value in _SANDBOX_VALUES:
        return Membership(kind=ContainerKind.POD_SANDBOX, sandbox_id=SandboxId(container_id))
    if value != "container":
        raise InvalidArgument(f"read annotation '{keys.container_type}': unknown container type {value[:100]!r}")
    sandbox_id = annotations.get(keys.sandbox_id, "")
    if not sandbox_id:
        raise InvalidArgument(f"read annotation '{keys.sandbox_id}': container '{container_id}' names no sandbox")
    if keys.sandbox_container_name and annotations.get(keys.container_name) == keys.sandbox_container_name:
        raise InvalidArgument(
            f"read annotation '{keys.sandbox_id}': '{container_id}' is a sandbox itself and cannot join another"
        )
    return Membership(
        kind=ContainerKind.POD_CONTAINER,
        sandbox_id=SandboxId(checked_id(sandbox_id, f"annotation '{keys.sandbox_id}'")),
    )
