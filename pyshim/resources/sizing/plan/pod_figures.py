"""The size of a pod, without its overhead, as its container runtime writes it into the sandbox's annotations. Pure.

containerd has an annotation for each figure. CRI-O has the kubelet's resources as one JSON object: newer releases under
the first key, older ones under the second. The key that a release does not write could be the pod's own.
"""

import re
from collections.abc import Mapping

import msgspec

from pyshim.model.decoding import damaged, decoded, json_value
from pyshim.model.errors import InvalidArgument
from pyshim.model.oci import Caller, caller_of

CONTAINERD_PREFIX = "io.kubernetes.cri.sandbox-"
_CRIO_KEYS = ("pod-linux-resources.crio.io", "io.kubernetes.cri-o.PodLinuxResources")
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


class PodFigures(msgspec.Struct, frozen=True, kw_only=True):
    """As in the CRI; 0 for a figure that is absent. The sources name the annotation of each figure."""

    quota_us: int = 0
    period_us: int = 0
    shares: int = 0
    memory_bytes: int = 0
    quota_source: str = ""
    shares_source: str = ""
    memory_source: str = ""


class _CrioResources(msgspec.Struct, frozen=True):
    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit_in_bytes: int = 0


def pod_figures(annotations: Mapping[str, str]) -> PodFigures:
    """Raises InvalidArgument naming the annotation that is wrong."""
    match caller_of(annotations):
        case Caller.CONTAINERD:
            return _containerds(annotations)
        case Caller.CRI_O:
            return _crios(annotations)
        case Caller.CRI_DOCKERD:
            return PodFigures()


def in_64_bits(value: int, where: str) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise InvalidArgument(f"read {where}: out of range for 64 bits")
    return value


def _containerds(annotations: Mapping[str, str]) -> PodFigures:
    return PodFigures(
        quota_us=_whole(annotations, "cpu-quota"),
        period_us=_whole(annotations, "cpu-period"),
        shares=_whole(annotations, "cpu-shares"),
        memory_bytes=_whole(annotations, "memory"),
        quota_source=f"annotations {CONTAINERD_PREFIX}cpu-quota, -cpu-period",
        shares_source=f"annotation {CONTAINERD_PREFIX}cpu-shares",
        memory_source=f"annotation {CONTAINERD_PREFIX}memory",
    )


def _whole(annotations: Mapping[str, str], name: str) -> int:
    text = annotations.get(CONTAINERD_PREFIX + name, "0")
    if not _WHOLE.fullmatch(text):
        raise InvalidArgument(f"read annotation '{CONTAINERD_PREFIX}{name}': not a whole number: {text[:100]!r}")
    return in_64_bits(int(text), f"annotation '{CONTAINERD_PREFIX}{name}'")


def _crios(annotations: Mapping[str, str]) -> PodFigures:
    keys = [key for key in _CRIO_KEYS if key in annotations]
    if not keys:
        return PodFigures()
    if len({annotations[key] for key in keys}) > 1:
        raise InvalidArgument(f"read annotations '{keys[0]}' and '{keys[1]}': they contradict each other")
    found = _crio_resources(keys[0], annotations[keys[0]])
    return PodFigures(
        quota_us=found.cpu_quota,
        period_us=found.cpu_period,
        shares=found.cpu_shares,
        memory_bytes=found.memory_limit_in_bytes,
        quota_source=f"annotation {keys[0]} cpu_quota/cpu_period",
        shares_source=f"annotation {keys[0]} cpu_shares",
        memory_source=f"annotation {keys[0]} memory_limit_in_bytes",
    )


def _crio_resources(key: str, text: str) -> _CrioResources:
    """The resources in `text`; none where Go wrote `null`."""
    refused = damaged(f"annotation '{key}'")
    value = json_value(text, refused)
    found = decoded({} if value is None else value, _CrioResources, refused)
    for name in _CrioResources.__struct_fields__:
        in_64_bits(getattr(found, name), f"annotation '{key}': {name}")
    return found
