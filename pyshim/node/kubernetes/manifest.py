"""Reads from Kubernetes manifests what decides a pod's size. Every scalar stays text: `0.1` never becomes a binary
number."""

import os
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.node.kubernetes.overhead import Overhead
from pyshim.node.kubernetes.pod_size import PodContainer, PodSizing, cpu_text, memory_text, quantity, with_defaults

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    **dict.fromkeys(
        ("Deployment", "DaemonSet", "StatefulSet", "ReplicaSet", "ReplicationController", "Job"), ("spec", "template")
    ),
}
"""Kinds that hold a pod, and where."""
_COPIES = {
    **dict.fromkeys(("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController"), "replicas"),
    "Job": "parallelism",
}
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


class PodManifest(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    """Kind, namespace and name, as messages name it."""
    runtime_class: str
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    copies: int = 1
    """Pods of this kind at a time: `replicas` of what keeps several, `parallelism` of a Job."""


def read_documents(path: str) -> list[Mapping[str, Any]]:
    """All objects of a YAML or JSON file, those in lists included. Raises FailedPrecondition or InvalidArgument."""
    import yaml

    class TextLoader(yaml.SafeLoader):
        """Numbers, dates and booleans stay as they are written."""

    plain = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    TextLoader.yaml_implicit_resolvers = plain
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise FailedPrecondition(f"read manifest '{path}': {error.strerror}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidArgument(f"read manifest '{path}': larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        documents = list(yaml.load_all(data, Loader=TextLoader))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # `!!int ""`, `!!bool x`
        raise InvalidArgument(f"read manifest '{path}': {' '.join(str(error).split())}") from error
    return list(_flattened(documents, path))


def pods_in(documents: list[Mapping[str, Any]], path: str) -> list[PodManifest]:
    """Every pod or pod template. Raises InvalidArgument when it holds none."""
    found = []
    for document in documents:
        kind = str(document.get("kind") or "")
        if kind not in _TEMPLATES:
            continue
        metadata = _mapping(document.get("metadata"), f"'{path}': {kind}.metadata")
        name = f"{metadata.get('namespace') or 'default'}/{metadata.get('name') or metadata.get('generateName') or '-'}"
        holder: Any = document
        for member in _TEMPLATES[kind]:
            holder = _mapping(holder, f"'{path}': {kind}").get(member)
        where = f"'{path}': {kind} {name}"
        members = _mapping(holder, f"'{path}': {kind}")
        spec = _mapping(members.get("spec"), f"{where}: spec")
        found.append(
            PodManifest(
                title=f"{kind} {name}",
                runtime_class=str(spec.get("runtimeClassName") or ""),
                annotations=annotations_in(_mapping(members.get("metadata"), f"{where}: metadata"), where),
                spec=spec,
                copies=_copies(_mapping(document.get("spec"), where), kind, where),
            )
        )
    if not found:
        kinds = ", ".join(sorted({str(document.get("kind")) for document in documents})) or "nothing"
        raise InvalidArgument(f"read manifest '{path}': no pod and no pod template in it, only {kinds}")
    return found


def _copies(spec: Mapping[str, Any], kind: str, where: str) -> int:
    name = _COPIES.get(kind, "")
    text = spec.get(name)
    if text is None:
        return 1
    if not isinstance(text, str) or not _COUNT.fullmatch(text):
        raise InvalidArgument(f"read {where}: {name}: not a number: {str(text)[:100]!r}")
    return int(text)


def annotations_in(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Raises InvalidArgument for values that are not text."""
    found = _mapping(metadata.get("annotations"), f"{where}: annotations")
    for name, text in found.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidArgument(f"read {where}: annotation {str(name)[:100]!r}: not text")
    return dict(found)


def overhead_of(documents: list[Mapping[str, Any]], name: str, path: str) -> dict[str, Fraction] | None:
    """podFixed of the RuntimeClass `name` (of the only one, when the pod names none); None when it is not there."""
    classes = [document for document in documents if document.get("kind") == "RuntimeClass"]
    for document in classes:
        own = _mapping(document.get("metadata"), f"'{path}': RuntimeClass.metadata").get("name")
        if own == name or (not name and len(classes) == 1):
            where = f"'{path}': RuntimeClass {own}: overhead"
            overhead = _mapping(document.get("overhead"), where)
            return amounts(overhead.get("podFixed"), f"{where}.podFixed")
    return None


def runtime_class(name: str, handler: str, overhead: Overhead, node_selector: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a RuntimeClass with this overhead. Its pods go to nodes with the labels."""
    fixed = {"memory": memory_text(overhead.memory_mib)}
    if overhead.cpus:
        fixed = {"cpu": cpu_text(overhead.cpus), **fixed}
    made: dict[str, Any] = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": handler,
        "overhead": {"podFixed": fixed},
    }
    return {**made, "scheduling": {"nodeSelector": dict(node_selector)}} if node_selector else made


def pod_sizing(manifest: PodManifest, path: str, class_overhead: Mapping[str, Fraction] | None) -> PodSizing:
    """The pod's figures. `class_overhead` replaces the spec's overhead, as the API server would."""
    where = f"'{path}': {manifest.title}"
    spec = manifest.spec
    level = _mapping(spec.get("resources"), f"{where}: resources")
    overhead = amounts(spec.get("overhead"), f"{where}: overhead") if class_overhead is None else class_overhead
    containers = _containers(spec, "containers", where)
    if not containers:
        raise InvalidArgument(f"read {where}: containers: there is none")
    return PodSizing(
        containers=containers,
        init_containers=_containers(spec, "initContainers", where),
        requests=amounts(level.get("requests"), f"{where}: resources.requests"),
        limits=amounts(level.get("limits"), f"{where}: resources.limits"),
        overhead=overhead,
        memory_volumes=_memory_volumes(spec, where),
    )


def _memory_volumes(spec: Mapping[str, Any], where: str) -> Fraction:
    entries = spec.get("volumes") or []
    if not isinstance(entries, list):
        raise InvalidArgument(f"read {where}: volumes: not a list")
    sizes: list[Fraction] = []
    for index, entry in enumerate(entries):
        at = f"{where}: volumes[{index}]"
        volume = _mapping(_mapping(entry, at).get("emptyDir"), f"{at}.emptyDir")
        if volume.get("medium") == "Memory":
            limits = {"sizeLimit": volume["sizeLimit"]} if volume.get("sizeLimit") is not None else {}
            sizes.extend(amounts(limits, f"{at}.emptyDir").values())
    return sum(sizes, Fraction(0))


def amounts(members: object, where: str) -> dict[str, Fraction]:
    """Resource name -> amount. Raises InvalidArgument naming the resource whose quantity is malformed."""
    found = {}
    for name, text in _mapping(members, where).items():
        if not isinstance(text, str):
            raise InvalidArgument(f"read {where}.{name}: not a quantity: {str(text)[:100]!r}")
        found[str(name)] = quantity(text, f"{where}.{name}")
    return found


def _containers(spec: Mapping[str, Any], member: str, where: str) -> tuple[PodContainer, ...]:
    entries = spec.get(member) or []
    if not isinstance(entries, list):
        raise InvalidArgument(f"read {where}: {member}: not a list")
    found = []
    for index, entry in enumerate(entries):
        at = f"{where}: {member}[{index}]"
        container = _mapping(entry, at)
        resources = _mapping(container.get("resources"), f"{at}.resources")
        limits = amounts(resources.get("limits"), f"{at}.resources.limits")
        requests = amounts(resources.get("requests"), f"{at}.resources.requests")
        for name, request in requests.items():
            if name in limits and request > limits[name]:
                raise InvalidArgument(f"read {at}.resources.requests.{name}: more than its limit")
        found.append(
            PodContainer(
                name=str(container.get("name") or f"{member}[{index}]"),
                requests=with_defaults(requests, limits),
                limits=limits,
                restartable=member == "initContainers" and container.get("restartPolicy") == "Always",
            )
        )
    return tuple(found)


def _flattened(documents: list[Any], path: str) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if document is None:
            continue
        top = _mapping(document, f"'{os.path.basename(path)}': document")
        if str(top.get("kind") or "").endswith("List") and isinstance(top.get("items"), list):
            yield from _flattened(top["items"], path)
        else:
            yield top


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"read {where}: not a mapping")
    return value
