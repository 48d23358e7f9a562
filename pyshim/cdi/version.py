"""Versions of the specification: which exist, and the least one a spec's content needs."""

from .spec import ContainerEdits, Spec

KNOWN_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
LEAST_VERSION = "0.3.0"
"""The version of a spec without newer content; so a spec that declares 0.1.0 or 0.2.0 is never valid."""


def plain_version(text: str) -> str:
    """`text` without the leading `v` that is tolerated."""
    return text.removeprefix("v")


def is_older(left: str, right: str) -> bool:
    """Both plain and known."""
    return KNOWN_VERSIONS.index(left) < KNOWN_VERSIONS.index(right)


def minimum_version(spec: Spec) -> str:
    """The oldest version that has everything `spec` uses."""
    for version, is_needed in (
        ("1.1.0", _needs_1_1_0),
        ("0.7.0", _needs_0_7_0),
        ("0.6.0", _needs_0_6_0),
        ("0.5.0", _needs_0_5_0),
        ("0.4.0", _needs_0_4_0),
    ):
        if is_needed(spec):
            return version
    return LEAST_VERSION


def _needs_1_1_0(spec: Spec) -> bool:
    return any(edits.net_devices or _new_rdt(edits) for edits in spec.all_edits())


def _new_rdt(edits: ContainerEdits) -> bool:
    return edits.intel_rdt is not None and bool(edits.intel_rdt.schemata or edits.intel_rdt.enable_monitoring)


def _needs_0_7_0(spec: Spec) -> bool:
    return any(edits.intel_rdt is not None or edits.additional_gids for edits in spec.all_edits())


def _needs_0_6_0(spec: Spec) -> bool:
    device_class = spec.kind.partition("/")[2]
    return bool(spec.annotations) or "." in device_class or any(device.annotations for device in spec.devices)


def _needs_0_5_0(spec: Spec) -> bool:
    by_digit = any(device.name[:1].isdigit() for device in spec.devices)
    return by_digit or any(node.host_path for edits in spec.all_edits() for node in edits.device_nodes)


def _needs_0_4_0(spec: Spec) -> bool:
    return any(mount.type for edits in spec.all_edits() for mount in edits.mounts)
