"""Devices that containers ask for by name. Few do, and `cdi.py` takes a tenth of the agent's start: they load it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.agent.oci_pb2 import Spec

from guest.agent.container.spec import Json
from guest.agent.settings import VISIBLE_DEVICES

if TYPE_CHECKING:
    from pyshim.cdi.spec import ContainerEdits

ANNOTATION_PREFIX = "cdi.k8s.io/"
_KIND_OF_CONTAINER = "io.katacontainers.pkg.oci.container_type"


class NamedDevices:
    """A spec of a device's kind has `timeout_s` to appear."""

    def __init__(self, *, timeout_s: float, reads_environment: bool) -> None:
        """With `reads_environment` a container may choose by the variable VISIBLE_CDI_DEVICES."""
        self._timeout_s = timeout_s
        self._reads_environment = reads_environment

    def are_asked_for(self, spec: Spec) -> bool:
        """True if a container of `spec` asks for devices by name. A pod's pause container gets none."""
        if spec.Annotations.get(_KIND_OF_CONTAINER) == "pod_sandbox":
            return False
        return any(key.startswith(ANNOTATION_PREFIX) for key in spec.Annotations) or bool(self._visible(spec))

    def _visible(self, spec: Spec) -> str:
        """The devices that the container itself chooses, if the sandbox allows that."""
        words = spec.Process.Env if self._reads_environment else ()
        chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == VISIBLE_DEVICES]
        return chosen[-1] if chosen else ""

    async def wait_for_edits(self, cid: str, spec: Spec) -> ContainerEdits:
        """As `cdi.wait_for_edits`."""
        from guest.agent.container import cdi

        return await cdi.wait_for_edits(cid, spec, self._visible(spec), timeout_s=self._timeout_s)

    @staticmethod
    def apply(config: Json, edits: ContainerEdits, cid: str, *, limits_devices: bool) -> None:
        """As `cdi.apply_edits`."""
        from guest.agent.container import cdi

        cdi.apply_edits(config, edits, cid, limits_devices=limits_devices)
