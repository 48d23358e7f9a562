"""Which kind of container a spec describes, and the sandbox it belongs to.

Source: the CRI annotations of containerd and CRI-O; a spec without any is a single container (ctr, nerdctl, docker).
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
    """A container's part in its sandbox: the sandbox itself, one of its containers, or its only one."""

    kind: ContainerKind
    sandbox_id: SandboxId


def membership(annotations: Mapping[str, str], container_id: ContainerId) -> Membership:
    """The container's kind and sandbox, as its annotations say.

    Raises InvalidArgument for an unknown type, a pod container without a sandbox, the types of two runtimes, and for a
    sandbox that names another one: under CRI-O a pod's annotations write over those of its sandbox.
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
    if keys.name_of_sandbox and annotations.get(keys.container_name) == keys.name_of_sandbox:
        raise InvalidArgument(
            f"read annotation '{keys.sandbox_id}': '{container_id}' is a sandbox itself, and joins none"
        )
    return Membership(
        kind=ContainerKind.POD_CONTAINER,
        sandbox_id=SandboxId(checked_id(sandbox_id, f"annotation '{keys.sandbox_id}'")),
    )
