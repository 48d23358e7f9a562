"""The sandbox, as CreateSandbox made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.agent.oci_pb2 import Hook

from guest.agent.children import Child


@dataclass(slots=True)
class Sandbox:
    """The one sandbox of this guest. Its hostname is that of the UTS namespace that all containers share.

    `pause` keeps the pid namespace that containers share, if the sandbox has one. `hooks` are the guest's own, by kind.
    """

    id: str = ""
    hostname: str = ""
    is_created: bool = False
    pause: Child | None = None
    hooks: Mapping[str, list[Hook]] = field(default_factory=dict)
