"""Versions of the specification: which exist, and the least one a spec's content needs."""

from .spec import Spec

KNOWN_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
LEAST_VERSION = "0.3.0"
"""The version of a spec without newer content. A spec that declares 0.1.0 or 0.2.0 is therefore invalid."""


def plain_version(text: str) -> str:
    """`text` without the leading `v` that is tolerated."""
    return text.removeprefix("v")


def is_older(left: str, right: str) -> bool:
    """Both plain and known."""
    return KNOWN_VERSIONS.index(left) < KNOWN_VERSIONS.index(right)


def minimum_version(spec: Spec) -> str:
    """The oldest version that has everything `spec` uses."""
    edits = spec.all_edits()
    rdts = [each.intel_rdt for each in edits if each.intel_rdt is not None]
    if any(each.net_devices for each in edits) or any(rdt.schemata or rdt.enable_monitoring for rdt in rdts):
        return "1.1.0"
    if rdts or any(each.additional_gids for each in edits):
        return "0.7.0"
    if spec.annotations or "." in spec.kind.partition("/")[2] or any(device.annotations for device in spec.devices):
        return "0.6.0"
    has_host_path = any(node.host_path for each in edits for node in each.device_nodes)
    if has_host_path or any(device.name[:1].isdigit() for device in spec.devices):
        return "0.5.0"
    if any(mount.type for each in edits for mount in each.mounts):
        return "0.4.0"
    return LEAST_VERSION
