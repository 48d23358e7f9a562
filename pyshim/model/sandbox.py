"""A sandbox as it is asked for."""

import msgspec

from pyshim.model.ids import SandboxId
from pyshim.model.kind import ContainerKind
from pyshim.model.oci import OciSpec
from pyshim.model.task import RuntimeOptions


class SandboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A VM to make, by the spec of the container it is made for, or by one written from a pod's configuration."""

    sandbox_id: SandboxId
    kind: ContainerKind
    spec: OciSpec
    options: RuntimeOptions | None
