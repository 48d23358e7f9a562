"""Answers the AdmissionReview of a pod: one pure function of the request's bytes and the configured classes.

Mutating, it writes annotations and never denies. Validating, it sees the pod as all webhooks have left it: it warns,
and denies what no node would ever start. An object that holds a template of pods is warned about as its pods would be,
and never denied. Source: Kubernetes, admission.k8s.io/v1.
"""

import base64
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.config.sources import Source
from pyshim.model.config import HYPERVISOR_PREFIX, Config
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import Disagreement, PolicyView, explain_pod
from pyshim.node.kubernetes.manifest import PodManifest, annotations_in, pod_sizing, pods_in
from pyshim.node.kubernetes.overhead import class_overhead
from pyshim.node.kubernetes.pod_config import pod_config
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.node.kubernetes.pod_vm import policy_in_force
from pyshim.resources.sizing.plan.capacity import check_vcpus, host_side_mib

API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"
MARK = "pyshim.io/written-by-webhook"
"""The annotations that the webhook wrote on the pod, as JSON. A second call may change those that still have the
written value; all others are the pod's own."""
MAX_WARNING_CHARS = 256
"""Longer ones are cut by the API server."""
TEMPLATES = {
    "apps": frozenset({"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"}),
    "batch": frozenset({"Job", "CronJob"}),
}
"""Kinds that hold a template of pods, by their API group; of version v1."""
PODS_DENIED = "pods denied"
"""The subject of the warning that each pod of a template will be denied."""
_REQUESTED_VCPUS, _REQUESTED_MEMORY = f"{HYPERVISOR_PREFIX}requested_vcpus", f"{HYPERVISOR_PREFIX}requested_memory"
_UNPROCESSABLE = 422


class Action(StrEnum):
    MUTATE = "mutate"
    VALIDATE = "validate"


class ReviewOutcome(StrEnum):
    IGNORED = "ignored"
    """Neither the creation of a pod of a configured class nor a new template of such pods."""
    PASSED = "passed"
    PATCHED = "patched"
    DENIED = "denied"


class PodClass(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime class: the configuration of its nodes, and the largest node, as far as it is known."""

    source: Source
    node: HostFacts
    host_side_mib: int | None
    """MiB a VM takes beside guest RAM; None: as measured, by the node's accelerator."""
    denied: frozenset[Disagreement] = frozenset()
    """A pod with one of these is denied, not only warned about."""

    def config(self, annotations: Mapping[str, str]) -> Config:
        """As the shim has it for a pod with these annotations. Raises ShimError where the shim refuses them."""
        return pod_config(self.source, annotations)

    def beside_mib(self, config: Config) -> int:
        return host_side_mib(config, self.node) if self.host_side_mib is None else self.host_side_mib


class ReviewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    document: Mapping[str, Any]
    """The AdmissionReview that goes back."""
    outcome: ReviewOutcome
    kinds: tuple[str, ...] = ()
    """The subjects of the warnings."""
    message: str = ""
    """The reason of a denial."""


class _CreatedPod(msgspec.Struct, frozen=True, kw_only=True):
    manifest: PodManifest
    has_metadata: bool
    has_annotations: bool


def answer(body: bytes, classes: Mapping[str, PodClass], action: Action) -> ReviewAnswer:
    """The answer to the review in `body`. Raises InvalidArgument when `body` holds no AdmissionReview."""
    request = _request(body)
    uid = request["uid"]
    try:
        if _is_template(request):
            return _answer_to_template(request, classes)
        pod = _created_pod(request)
        chosen = classes.get(pod.manifest.runtime_class) if pod else None
        if pod is None or chosen is None:
            return _ignored(uid)
        return _patched(uid, pod, chosen) if action is Action.MUTATE else _judged(uid, pod, chosen)
    except ShimError as error:
        if action is Action.MUTATE:
            return ReviewAnswer(document=_response(uid, {"allowed": True}), outcome=ReviewOutcome.PASSED)
        return _denied(uid, str(error))


def _request(body: bytes) -> Mapping[str, Any]:
    try:
        # Numbers stay text, as in manifests: a quantity may be written as one.
        document = json.loads(body, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"read {KIND}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidArgument(f"read {KIND}: not an object")
    kind, version = document.get("kind"), document.get("apiVersion")
    if (kind, version) != (KIND, API_VERSION):
        raise InvalidArgument(f"read {KIND}: kind {_shown(kind)} of {_shown(version)}, not {KIND} of {API_VERSION}")
    request = document.get("request")
    if not isinstance(request, dict):
        raise InvalidArgument(f"read {KIND}: request: not an object")
    if not isinstance(request.get("uid"), str) or not request["uid"]:
        raise InvalidArgument(f"read {KIND}: request.uid: none is given")
    return request


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _shown(value: object) -> str:
    return repr(value)[:100]


def _named(request: Mapping[str, Any]) -> tuple[object, object, object]:
    """Group, version and kind of the object."""
    kind = request.get("kind")
    return (kind.get("group") or "", kind.get("version"), kind.get("kind")) if isinstance(kind, dict) else ("", "", "")


def _is_template(request: Mapping[str, Any]) -> bool:
    """The request makes or changes an object that holds a template of pods."""
    group, version, kind = _named(request)
    changes = request.get("operation") in ("CREATE", "UPDATE") and not request.get("subResource")
    return changes and version == "v1" and isinstance(group, str) and kind in TEMPLATES.get(group, ())


def _created_pod(request: Mapping[str, Any]) -> _CreatedPod | None:
    """The pod, if the request creates one; None for a request about an existing pod."""
    if _named(request) != ("", "v1", "Pod") or request.get("operation") != "CREATE" or request.get("subResource"):
        return None
    pod = _mapping(request.get("object"), "request.object")
    metadata = _mapping(pod.get("metadata"), "metadata")
    spec = _mapping(pod.get("spec"), "spec")
    namespace = metadata.get("namespace") or request.get("namespace") or "default"
    name = metadata.get("name") or metadata.get("generateName") or "-"
    title = f"Pod {namespace}/{name}"
    return _CreatedPod(
        manifest=PodManifest(
            title=title,
            runtime_class=str(spec.get("runtimeClassName") or ""),
            annotations=annotations_in(metadata, title),
            spec=spec,
        ),
        has_metadata=pod.get("metadata") is not None,
        has_annotations=metadata.get("annotations") is not None,
    )


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"read {KIND}: {where}: not an object")
    return value


def _patched(uid: str, pod: _CreatedPod, chosen: PodClass) -> ReviewAnswer:
    wanted = _annotated(pod.manifest, chosen)
    patch = _patch(pod, wanted)
    if not patch:
        return ReviewAnswer(document=_response(uid, {"allowed": True}), outcome=ReviewOutcome.PASSED)
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    response = {"allowed": True, "patchType": "JSONPatch", "patch": encoded}
    return ReviewAnswer(document=_response(uid, response), outcome=ReviewOutcome.PATCHED)


def _annotated(manifest: PodManifest, chosen: PodClass) -> dict[str, str]:
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


def _patch(pod: _CreatedPod, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    """RFC 6902, from the pod's annotations to `wanted`."""
    if wanted == pod.manifest.annotations:
        return []
    if not pod.has_metadata:
        return [{"op": "add", "path": "/metadata", "value": {"annotations": dict(wanted)}}]
    if not pod.has_annotations:
        return [{"op": "add", "path": "/metadata/annotations", "value": dict(wanted)}]
    operations: list[dict[str, Any]] = []
    for name in sorted({*pod.manifest.annotations, *wanted}):
        path = "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")
        if name not in wanted:
            operations.append({"op": "remove", "path": path})
        elif pod.manifest.annotations.get(name) != wanted[name]:
            # `add` replaces an existing value.
            operations.append({"op": "add", "path": path, "value": wanted[name]})
    return operations


def _judged(uid: str, pod: _CreatedPod, chosen: PodClass) -> ReviewAnswer:
    """Raises ShimError for a pod that no node would start."""
    view = _view(pod.manifest, chosen, None)
    size = f"{view.record.vcpus.granted} vCPU, {view.record.memory_mib.granted} MiB"
    return _warned(uid, _subjects(view), {"auditAnnotations": {"vm-size": size}})


def _answer_to_template(request: Mapping[str, Any], classes: Mapping[str, PodClass]) -> ReviewAnswer:
    """Warnings about the pods of the template, or the error that will deny each of them.

    An unchanged template, or one whose owner is judged itself, is ignored.
    """
    uid = request["uid"]
    try:
        document = _mapping(request.get("object"), "request.object")
        if _mapping(document.get("metadata"), "metadata").get("ownerReferences"):
            return _ignored(uid)
        manifest = _template_in(document)
        chosen = classes.get(manifest.runtime_class)
        old = request.get("oldObject")
        if chosen is None or (old and _template_in(_mapping(old, "request.oldObject")) == manifest):
            return _ignored(uid)
        view = _view(replace(manifest, annotations=_annotated(manifest, chosen)), chosen, _class_overhead(chosen))
    except ShimError as error:
        return _warned(uid, ((PODS_DENIED, str(error)),), {})
    return _warned(uid, _subjects(view), {})


def _template_in(document: Mapping[str, Any]) -> PodManifest:
    (manifest,) = pods_in([document], KIND)
    return replace(manifest, copies=1)


def _class_overhead(chosen: PodClass) -> dict[str, Fraction]:
    """The overhead that fits the class. A pod has its class's from the API server; a template has none yet."""
    config = chosen.config({})
    fitting = class_overhead(config, policy_in_force(config), chosen.beside_mib(config))
    return {CPU: fitting.cpus, MEMORY: fitting.memory_mib * MIB}


def _view(manifest: PodManifest, chosen: PodClass, overhead: Mapping[str, Fraction] | None) -> PolicyView:
    """The pod's VM by the policy in force.

    Raises ShimError for a pod that no node would start, or that has what the operator denies.
    """
    config = chosen.config(manifest.annotations)
    sizing = pod_sizing(manifest, KIND, overhead)
    _check_network(manifest, config)
    node = unbounded(chosen.node) if config.is_remote else chosen.node
    check_vcpus(config, node)
    view = explain_pod(sizing, config, node, host_side_mib=chosen.beside_mib(config)).view_in_force
    _check_room(manifest, sizing, node)
    if refused := [found for found in view.findings if found.kind in chosen.denied]:
        raise InvalidArgument(f"admit {manifest.title}: {refused[0].kind.value}: {refused[0].text}")
    return view


def _subjects(view: PolicyView) -> tuple[tuple[str, str], ...]:
    """Subject and text of each warning."""
    return tuple((found.kind.value, found.text) for found in view.findings)


def _check_room(manifest: PodManifest, pod: PodSizing, node: HostFacts) -> None:
    """Raises InvalidArgument for a pod that the scheduler places on no node, as far as the largest one is known."""
    reserved = pod.reserved()
    for name, has, unit, unit_name in ((CPU, node.cpu_count, 1, "CPUs"), (MEMORY, node.memory_mib, MIB, "MiB")):
        wanted = reserved.get(name, Fraction(0)) / unit
        if has and wanted > has:
            raise InvalidArgument(
                f"admit {manifest.title}: requests + overhead are {decimal(wanted)} {unit_name}, "
                f"the largest node has {has}"
            )


def _check_network(manifest: PodManifest, config: Config) -> None:
    if manifest.spec.get("hostNetwork") is True and (config.is_remote or not config.runtime.allow_host_network):
        raise InvalidArgument(f"admit {manifest.title}: hostNetwork is true, and a VM cannot have the host's network")


def _ignored(uid: str) -> ReviewAnswer:
    return ReviewAnswer(document=_response(uid, {"allowed": True}), outcome=ReviewOutcome.IGNORED)


def _warned(uid: str, subjects: tuple[tuple[str, str], ...], more: Mapping[str, Any]) -> ReviewAnswer:
    response: dict[str, Any] = {"allowed": True, **more}
    if subjects:
        response["warnings"] = [_cut(f"pyshim: {subject}: {text}") for subject, text in subjects]
    kinds = tuple(subject for subject, _ in subjects)
    return ReviewAnswer(document=_response(uid, response), outcome=ReviewOutcome.PASSED, kinds=kinds)


def _denied(uid: str, message: str) -> ReviewAnswer:
    status = {"code": _UNPROCESSABLE, "reason": "Invalid", "message": f"pyshim: {message}"}
    document = _response(uid, {"allowed": False, "status": status})
    return ReviewAnswer(document=document, outcome=ReviewOutcome.DENIED, message=message)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WARNING_CHARS else text[: MAX_WARNING_CHARS - 3] + "..."


def _response(uid: str, members: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": uid, **members}}
