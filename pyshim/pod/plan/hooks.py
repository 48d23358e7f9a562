"""OCI hooks: which run on the host, which in the guest, and the state that they read. Pure.

prestart, createRuntime, poststart and poststop run in the runtime's namespaces, which are the host's. createContainer
and startContainer run in the container's: the agent gets them in the spec, and their programs are in the guest.
Source: OCI runtime-spec, config.md "POSIX-platform Hooks" and runtime.md "State".
"""

import json
from collections.abc import Mapping
from typing import Any

from pyshim.model.oci import OciSpec

_IN_GUEST = ("createContainer", "startContainer")


def guest_hooks(hooks: Mapping[str, Any] | None) -> dict[str, Any]:
    """The hooks that the agent runs."""
    return {kind: hooks[kind] for kind in _IN_GUEST if hooks.get(kind)} if hooks else {}


def makes_network(spec: OciSpec) -> bool:
    """The spec has hooks that may add interfaces to the network namespace, so it must exist before the VM."""
    return bool(spec.hooks.prestart or spec.hooks.create_runtime)


def hook_state(spec: OciSpec, *, container_id: str, bundle: str, status: str, pid: int) -> bytes:
    """The container's state as JSON for a hook's stdin; without `pid` if that is 0."""
    state: dict[str, object] = {
        "ociVersion": str(spec.raw.get("ociVersion", "")),
        "id": container_id,
        "status": status,
        "bundle": bundle,
        "annotations": dict(spec.annotations),
    }
    return json.dumps({**state, "pid": pid} if pid else state).encode()
