"""Judges a pod of a class: the size of its VM with the findings, the annotations that it gets, or a denial. Pure."""

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.config.sources import Source
from pyshim.model.config import HYPERVISOR_PREFIX, Config
from pyshim.model.decoding import json_value
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import Disagreement, PolicyView, explain_pod
from pyshim.node.kubernetes.manifest import PodManifest, pod_sizing
from pyshim.node.kubernetes.overhead import class_overhead
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.node.kubernetes.pod_vm import pod_config, policy_in_force
from pyshim.resources.sizing.plan.capacity import check_vcpus, host_side_mib

KIND = "AdmissionReview"
"""The object in which all pods come; errors name it."""
MARK = "pyshim.io/written-by-webhook"
"""The annotations that the webhook wrote on the pod, as JSON. A second call may change those that still have the
written value; all others are the pod's own."""
_REQUESTED_VCPUS, _REQUESTED_MEMORY = f"{HYPERVISOR_PREFIX}requested_vcpus", f"{HYPERVISOR_PREFIX}requested_memory"


class PodClass(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the class's nodes, and the largest node, as far as it is known."""

    source: Source
    node: HostFacts
    host_side_mib: int | None
    """MiB that a VM takes beside guest RAM; None: as documented, by the node's accelerator."""
    has_quotas: bool = True
    """The nodes' kubelets limit CPUs by quotas. False: `cpuCFSQuota: false`."""
    denied: frozenset[Disagreement] = frozenset()
    """A pod with one of these is denied, not only warned about."""

    def config(self, annotations: Mapping[str, str]) -> Config:
        """The shim's configuration for a pod with these annotations. Raises ShimError if the shim refuses them."""
        return pod_config(self.source, annotations)

    def host_side_of(self, config: Config) -> int:
        """MiB that a VM of this configuration takes beside guest RAM."""
        return host_side_mib(config, self.node) if self.host_side_mib is None else self.host_side_mib


def vm_of_pod(manifest: PodManifest, chosen: PodClass, overhead: Mapping[str, Fraction] | None) -> PolicyView:
    """The pod's VM by the policy in force; `overhead` replaces that of the pod's spec.

    Raises ShimError for a pod that no node would start, or that has what the operator denies.
    """
    config = chosen.config(manifest.annotations)
    sizing = replace(pod_sizing(manifest, KIND, overhead), has_quotas=chosen.has_quotas)
    _check_network(manifest, config)
    node = unbounded(chosen.node) if config.is_remote else chosen.node
    check_vcpus(config, node)
    view = explain_pod(sizing, config, node, host_side_mib=chosen.host_side_of(config)).view_in_force
    _check_room(manifest, sizing, node)
    if refused := [found for found in view.findings if found.kind in chosen.denied]:
        raise InvalidArgument(f"admit {manifest.title}: {refused[0].kind.value}: {refused[0].text}")
    return view


def overhead_of(chosen: PodClass) -> dict[str, Fraction]:
    """The least overhead that covers the VMs of the class.

    It stands for the overhead of the RuntimeClass, which the API server writes into pods, not into templates.
    """
    config = chosen.config({})
    fitting = class_overhead(config, policy_in_force(config), chosen.host_side_of(config))
    return {CPU: fitting.cpus, MEMORY: fitting.memory_mib * MIB}


def _check_room(manifest: PodManifest, pod: PodSizing, node: HostFacts) -> None:
    """Raises InvalidArgument for a pod that the scheduler places on no node, as far as the largest one is known."""
    reserved = pod.reserved()
    for name, available, unit, unit_name in ((CPU, node.cpu_count, 1, "CPUs"), (MEMORY, node.memory_mib, MIB, "MiB")):
        wanted = reserved.get(name, Fraction(0)) / unit
        if available and wanted > available:
            raise InvalidArgument(
                f"admit {manifest.title}: requests + overhead are {decimal(wanted)} {unit_name}, "
                f"the largest node has {available}"
            )


def _check_network(manifest: PodManifest, config: Config) -> None:
    if manifest.spec.get("hostNetwork") is True and (config.is_remote or not config.runtime.allow_host_network):
        raise InvalidArgument(f"admit {manifest.title}: hostNetwork is true, and a VM cannot have the host's network")


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
    """Annotations with the pod's requests and huge pages, if these are more than its limits, all that a shim learns."""
    requests, limits = pod.effective_requests(), pod.effective_limits()
    found = {}
    if requests.get(CPU, Fraction(0)) > limits.get(CPU, Fraction(0)):
        found[_REQUESTED_VCPUS] = decimal(Fraction(math.ceil(requests[CPU] * 1000), 1000))
    if pod.vm_memory() > limits.get(MEMORY, Fraction(0)):
        found[_REQUESTED_MEMORY] = str(math.ceil(pod.vm_memory() / MIB))
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
        found = json_value(annotations.get(MARK, "{}"), ValueError)
    except ValueError:
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
