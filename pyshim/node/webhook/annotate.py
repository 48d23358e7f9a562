"""The annotations that the webhook writes on a pod: its requests, which a shim does not learn otherwise. Pure."""

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pyshim.model.config import HYPERVISOR_PREFIX
from pyshim.model.errors import ShimError
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.manifest import PodManifest, pod_sizing
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.node.webhook.pod_class import KIND, PodClass

MARK = "pyshim.io/written-by-webhook"
"""The annotations that the webhook wrote on the pod, as JSON. A second call may change those that still have the
written value; all others are the pod's own."""
_REQUESTED_VCPUS, _REQUESTED_MEMORY = f"{HYPERVISOR_PREFIX}requested_vcpus", f"{HYPERVISOR_PREFIX}requested_memory"


def annotated(manifest: PodManifest, chosen: PodClass) -> dict[str, str]:
    """The annotations that the pod should have. Those of an earlier call are dropped first."""
    written = _written(manifest.annotations)
    own = {name: text for name, text in manifest.annotations.items() if name != MARK and written.get(name) != text}
    chosen.config(own)
    added = {
        name: text
        for name, text in _requested(pod_sizing(manifest, KIND, None)).items()
        if name not in own and _is_enabled(chosen, {**own, name: text})
    }
    return {**own, **added, MARK: json.dumps(added, sort_keys=True)} if added else own


def _requested(pod: PodSizing) -> dict[str, str]:
    """Annotations with the pod's requests, for resources whose limits are less: a shim learns only limits."""
    requests, limits = pod.effective_requests(), pod.effective_limits()
    unseen = {name: amount for name, amount in requests.items() if amount > limits.get(name, Fraction(0))}
    found = {}
    if CPU in unseen:
        found[_REQUESTED_VCPUS] = decimal(Fraction(math.ceil(unseen[CPU] * 1000), 1000))
    if MEMORY in unseen:
        found[_REQUESTED_MEMORY] = str(math.ceil(unseen[MEMORY] / MIB))
    return found


def _is_enabled(chosen: PodClass, annotations: Mapping[str, str]) -> bool:
    """True when the shim takes them: the file's `enable_annotations` decides."""
    try:
        chosen.config(annotations)
    except ShimError:
        return False
    return True


def _written(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """The mark's annotations. Any client can write the mark, so an unreadable one counts as empty."""
    try:
        found = json.loads(annotations.get(MARK, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_patch(pod: Mapping[str, Any], wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    """The operations (RFC 6902) that give the pod object the annotations `wanted`; empty if it has them."""
    metadata = pod.get("metadata")
    annotations = (metadata or {}).get("annotations")
    found = annotations or {}
    if wanted == found:
        return []
    if metadata is None:
        return [{"op": "add", "path": "/metadata", "value": {"annotations": dict(wanted)}}]
    if annotations is None:
        return [{"op": "add", "path": "/metadata/annotations", "value": dict(wanted)}]
    operations: list[dict[str, Any]] = []
    for name in sorted({*found, *wanted}):
        path = "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")
        if name not in wanted:
            operations.append({"op": "remove", "path": path})
        elif found.get(name) != wanted[name]:
            # `add` replaces an existing value.
            operations.append({"op": "add", "path": path, "value": wanted[name]})
    return operations
