"""Whether a container asks for devices by name. Apart from `cdi.py`, whose imports cost the guest more than a start."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent
    from guest.agent.wire.codec import Message

ANNOTATION_PREFIX = "cdi.k8s.io/"
VISIBLE_DEVICES = "VISIBLE_CDI_DEVICES"
_KIND_OF_CONTAINER = "io.katacontainers.pkg.oci.container_type"


def asks_for_devices(agent: Agent, spec: Message) -> bool:
    """Whether a container of `spec` is to get devices by name. The pause container of a pod never is."""
    if spec.Annotations.get(_KIND_OF_CONTAINER) == "pod_sandbox":
        return False
    return any(key.startswith(ANNOTATION_PREFIX) for key in spec.Annotations) or bool(visible(agent, spec))


def visible(agent: Agent, spec: Message) -> str:
    """The container's own choice of devices, where the sandbox allows it one."""
    found = ""
    if agent.settings.visible_cdi_devices:
        for text in spec.Process.Env:
            name, _, value = text.partition("=")
            if name == VISIBLE_DEVICES:
                found = value
    return found
