"""The sandbox, as CreateSandbox made it."""

from __future__ import annotations

from collections.abc import Mapping

from protos.agent.oci_pb2 import Hook

from guest.agent.children import Child


class Sandbox:
    """The one sandbox of this guest. Its hostname is that of the UTS namespace that all containers share.

    `pause` keeps the pid namespace that containers share, if the sandbox has one. `hooks` are the guest's own, by kind.
    """

    def __init__(self) -> None:
        self.id = ""
        self.hostname = ""
        self.is_created = False
        self.pause: Child | None = None
        self.hooks: Mapping[str, list[Hook]] = {}
