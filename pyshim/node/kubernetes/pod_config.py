"""The configuration of a pod: its node's file, changed by the pod's annotations."""

from collections.abc import Mapping

from pyshim.config.load import for_pod, refuse_unsupported, typed
from pyshim.config.sources import Source
from pyshim.model.config import Config

PASSED_ON = "io.katacontainers."
"""Annotations that reach the shim: `pod_annotations` of the container runtime."""


def pod_config(source: Source, annotations: Mapping[str, str]) -> Config:
    """The shim's configuration for a pod with these annotations. Raises ShimError if the shim refuses them."""
    passed = {name: text for name, text in annotations.items() if name.startswith(PASSED_ON)}
    # Only the node can see its own files.
    effective = for_pod(source, passed, exists=lambda _path: True)
    config = typed(effective)
    refuse_unsupported(effective)
    return config
