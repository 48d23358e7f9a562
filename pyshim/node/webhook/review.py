"""Answers the AdmissionReview of a pod: one pure function of the request's bytes and the configured classes.

Mutating, it writes annotations and never denies. Validating, it sees the pod as all webhooks have left it: it warns,
and denies what no node would ever start. An object that holds a template of pods is warned about as its pods would be,
and never denied. Source: Kubernetes, admission.k8s.io/v1.
"""

import base64
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import json_value
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.node.kubernetes.agreement import PolicyView
from pyshim.node.kubernetes.manifest import PodManifest, annotations_in, pods_in
from pyshim.node.webhook.judge import KIND, PodClass, annotated, json_patch, overhead_of, vm_of_pod

API_VERSION = "admission.k8s.io/v1"
MAX_DEPTH = 64
"""Objects and lists in one another; those of a pod are about 20."""
_NO_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[^][{}"]++', re.DOTALL)
"""Strings, and what stands between brackets."""
MAX_WARNING_CHARS = 256
"""Longer ones are cut by the API server."""
TEMPLATES = {
    "apps": frozenset({"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"}),
    "batch": frozenset({"Job", "CronJob"}),
}
"""Kinds that hold a template of pods, by their API group; of version v1."""
PODS_DENIED = "pods denied"
"""The subject of the warning that each pod of a template will be denied."""
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


class ReviewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    document: Mapping[str, Any]
    """The AdmissionReview that goes back."""
    outcome: ReviewOutcome
    kinds: tuple[str, ...] = ()
    """The subjects of the warnings."""
    message: str = ""
    """The reason of a denial."""


def answer(body: bytes, classes: Mapping[str, PodClass], action: Action) -> ReviewAnswer:
    """The answer to the review in `body`. Raises InvalidArgument when `body` holds no AdmissionReview."""
    request = _request(body)
    uid = request["uid"]
    try:
        if _is_template(request):
            return _answer_to_template(request, classes)
        manifest = _created_pod(request)
        chosen = classes.get(manifest.runtime_class) if manifest else None
        if manifest is None or chosen is None:
            return _ignored(uid)
        if action is Action.MUTATE:
            return _patched(uid, json_patch(request["object"], annotated(manifest, chosen)))
        return _judged(uid, vm_of_pod(manifest, chosen, None))
    except ShimError as error:
        if action is Action.MUTATE:
            return ReviewAnswer(document=_response(uid, {"allowed": True}), outcome=ReviewOutcome.PASSED)
        return _denied(uid, str(error))


_Member = msgspec.Raw | msgspec.UnsetType


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    kind: _Member = msgspec.UNSET
    api_version: _Member = msgspec.UNSET
    request: _Member = msgspec.UNSET


class _Request(msgspec.Struct, frozen=True, rename="camel"):
    uid: _Member = msgspec.UNSET
    kind: _Member = msgspec.UNSET
    operation: _Member = msgspec.UNSET
    sub_resource: _Member = msgspec.UNSET
    namespace: _Member = msgspec.UNSET
    object: _Member = msgspec.UNSET
    old_object: _Member = msgspec.UNSET


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """A pod, or an object that holds a template of pods."""

    kind: _Member = msgspec.UNSET
    api_version: _Member = msgspec.UNSET
    metadata: _Member = msgspec.UNSET
    spec: _Member = msgspec.UNSET


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: _Member = msgspec.UNSET
    generate_name: _Member = msgspec.UNSET
    namespace: _Member = msgspec.UNSET
    annotations: _Member = msgspec.UNSET
    owner_references: _Member = msgspec.UNSET


_NESTED: Mapping[tuple[type[msgspec.Struct], str], type[msgspec.Struct]] = {
    (_Review, "request"): _Request,
    (_Request, "object"): _Object,
    (_Request, "oldObject"): _Object,
    (_Object, "metadata"): _Metadata,
}
"""The members that are decoded member by member. Others that the classes do not name are skipped, and take no memory:
`managedFields`, the status, the user's groups."""


def _request(body: bytes) -> Mapping[str, Any]:
    _check_depth(body)
    document = _members(body, _Review)
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


def _members(content: bytes | msgspec.Raw, known: type[msgspec.Struct]) -> Any:
    """The members that `known` names; whatever else the content is, if it is no object."""
    try:
        found = msgspec.json.decode(content, type=known)
    except (msgspec.DecodeError, RecursionError):
        return _value(content)  # it is no object, or the error has its text from the one reader
    members = {}
    for field in msgspec.structs.fields(known):
        value = getattr(found, field.name)
        if value is not msgspec.UNSET:
            nested = _NESTED.get((known, field.encode_name))
            members[field.encode_name] = _members(value, nested) if nested else _value(value)
    return members


def _value(content: bytes | msgspec.Raw) -> Any:
    # Numbers stay text, as in manifests: a quantity may be written as one.
    return json_value(bytes(content), lambda problem: InvalidArgument(f"read {KIND}: {problem}"), number=str)


def _check_depth(body: bytes) -> None:
    """Raises InvalidArgument for objects and lists that are nested deeper than any of Kubernetes'."""
    depth = 0
    for bracket in _NO_BRACKETS.sub(b"", body):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidArgument(f"read {KIND}: not JSON: nested deeper than {MAX_DEPTH}")


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


def _created_pod(request: Mapping[str, Any]) -> PodManifest | None:
    """The pod, if the request creates one; None for a request about an existing pod."""
    if _named(request) != ("", "v1", "Pod") or request.get("operation") != "CREATE" or request.get("subResource"):
        return None
    pod = _mapping(request.get("object"), "request.object")
    metadata = _mapping(pod.get("metadata"), "metadata")
    spec = _mapping(pod.get("spec"), "spec")
    namespace = metadata.get("namespace") or request.get("namespace") or "default"
    name = metadata.get("name") or metadata.get("generateName") or "-"
    title = f"Pod {namespace}/{name}"
    return PodManifest(
        title=title,
        runtime_class=str(spec.get("runtimeClassName") or ""),
        annotations=annotations_in(metadata, title),
        spec=spec,
    )


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"read {KIND}: {where}: not an object")
    return value


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
        view = vm_of_pod(replace(manifest, annotations=annotated(manifest, chosen)), chosen, overhead_of(chosen))
    except ShimError as error:
        return _warned(uid, ((PODS_DENIED, str(error)),), {})
    return _warned(uid, _warnings(view), {})


def _template_in(document: Mapping[str, Any]) -> PodManifest:
    (manifest,) = pods_in([document], KIND)
    return replace(manifest, copies=1)


def _warnings(view: PolicyView) -> tuple[tuple[str, str], ...]:
    """Subject and text of each warning."""
    return tuple((found.kind.value, found.text) for found in view.findings)


# ---- answers


def _patched(uid: str, patch: list[dict[str, Any]]) -> ReviewAnswer:
    if not patch:
        return ReviewAnswer(document=_response(uid, {"allowed": True}), outcome=ReviewOutcome.PASSED)
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    response = {"allowed": True, "patchType": "JSONPatch", "patch": encoded}
    return ReviewAnswer(document=_response(uid, response), outcome=ReviewOutcome.PATCHED)


def _judged(uid: str, view: PolicyView) -> ReviewAnswer:
    size = f"{view.record.vcpus.granted} vCPU, {view.record.memory_mib.granted} MiB"
    return _warned(uid, _warnings(view), {"auditAnnotations": {"vm-size": size}})


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
