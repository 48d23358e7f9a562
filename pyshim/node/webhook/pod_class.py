"""A runtime class, as the webhook is configured."""

from collections.abc import Mapping

import msgspec

from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.node.kubernetes.agreement import Disagreement
from pyshim.node.kubernetes.pod_config import pod_config
from pyshim.resources.sizing.plan.capacity import host_side_mib

KIND = "AdmissionReview"
"""The object in which all pods come; errors name it."""


class PodClass(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the class's nodes, and the largest node, as far as it is known."""

    source: Source
    node: HostFacts
    host_side_mib: int | None
    """MiB that a VM takes beside guest RAM; None: as documented, by the node's accelerator."""
    denied: frozenset[Disagreement] = frozenset()
    """A pod with one of these is denied, not only warned about."""

    def config(self, annotations: Mapping[str, str]) -> Config:
        """The shim's configuration for a pod with these annotations. Raises ShimError if the shim refuses them."""
        return pod_config(self.source, annotations)

    def host_side_of(self, config: Config) -> int:
        """MiB that a VM of this configuration takes beside guest RAM."""
        return host_side_mib(config, self.node) if self.host_side_mib is None else self.host_side_mib
