"""The installation in the Node object: labels, annotations, the start-up taint. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

PREFIX = "pyshim.io/"
STATE = f"{PREFIX}state"
RELEASE, MESSAGE, OLDER_PODS = (f"{PREFIX}{name}" for name in ("release", "message", "older-pods"))
_MAX_MESSAGE = 1000
_MAX_PODS = 50
"""Annotations of an object have 256 KiB together; a node has some hundred pods."""


class State(StrEnum):
    """The label `pyshim.io/state`."""

    INSTALLING = "installing"
    READY = "ready"
    FAILED = "failed"
    REMOVING = "removing"


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Our labels and annotations on the Node object. Without a state there are none."""

    state: State | None = None
    handlers: frozenset[str] = frozenset()
    """A test pod ran through these with the present installation."""
    release: str = ""
    message: str = ""
    """The error, or the event for which the agent waits."""
    older_pods: tuple[str, ...] = ()
    """Pods that run with the code of an earlier release."""


def handler_label(handler: str) -> str:
    """The label by which a RuntimeClass's nodeSelector finds the nodes of this handler."""
    return f"{PREFIX}{handler}"


def report_of(node: Mapping[str, Any]) -> NodeReport:
    """The report of an earlier agent. A state that no version of ours writes counts as failed."""
    labels, annotations = _texts(node, "labels"), _texts(node, "annotations")
    state = labels.get(STATE)
    pods = annotations.get(OLDER_PODS, "")
    return NodeReport(
        state=None if state is None else State(state) if state in set(State) else State.FAILED,
        handlers=_handlers_in(labels),
        release=annotations.get(RELEASE, ""),
        message=annotations.get(MESSAGE, ""),
        older_pods=tuple(pods.split(",")) if pods else (),
    )


def report_patch(node: Mapping[str, Any], report: NodeReport) -> dict[str, Any] | None:
    """A JSON merge patch (RFC 7386) after which the node has `report`; None if it has it already.

    Labels and annotations of others stay: the patch names ours only.
    """
    handlers = _handlers_in(_texts(node, "labels")) | report.handlers
    labels: dict[str, str | None] = {STATE: report.state}
    labels |= {handler_label(each): "true" if each in report.handlers else None for each in sorted(handlers)}
    annotations = {
        RELEASE: report.release,
        MESSAGE: report.message[:_MAX_MESSAGE],
        OLDER_PODS: _listed(report.older_pods),
    }
    if report.state is None:
        labels, annotations = dict.fromkeys(labels), dict.fromkeys(annotations, "")
    metadata = {
        "labels": _changed(_texts(node, "labels"), labels),
        "annotations": _changed(
            _texts(node, "annotations"), {name: text or None for name, text in annotations.items()}
        ),
    }
    changed = {kind: found for kind, found in metadata.items() if found}
    return {"metadata": changed} if changed else None


def untainted_patch(node: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """A merge patch that removes the taints of this key; None without such a taint.

    The patch replaces the whole list, so it names the version of the object: a taint added meanwhile, as by
    `kubectl drain`, makes it fail with a conflict.
    """
    taints = (node.get("spec") or {}).get("taints") or []
    left = [each for each in taints if each.get("key") != key]
    if left == taints:
        return None
    version = (node.get("metadata") or {}).get("resourceVersion", "")
    return {"metadata": {"resourceVersion": version}, "spec": {"taints": left or None}}


def _handlers_in(labels: Mapping[str, str]) -> frozenset[str]:
    """The handlers that our labels name, which are all but the label of the state."""
    return frozenset(label.removeprefix(PREFIX) for label in labels if label.startswith(PREFIX) and label != STATE)


def _texts(node: Mapping[str, Any], kind: str) -> Mapping[str, str]:
    return (node.get("metadata") or {}).get(kind) or {}


def _changed(found: Mapping[str, str], wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    return {name: text for name, text in wanted.items() if found.get(name) != text}


def _listed(pods: Sequence[str]) -> str:
    more = len(pods) - _MAX_PODS
    return ",".join(pods[:_MAX_PODS]) + (f",and {more} more" if more > 0 else "")
