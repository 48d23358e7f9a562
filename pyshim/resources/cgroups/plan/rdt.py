"""The class of cache and memory bandwidth (Intel RDT, AMD QoS, ARM MPAM) of a container: a resctrl group.

Runtimes write it into the container's spec: containerd and CRI-O from the pod's annotation
`rdt.resources.beta.kubernetes.io/pod`, or as an NRI plugin says. Source: OCI runtime-spec, config-linux.md, "IntelRdt".
"""

from collections.abc import Mapping
from typing import Any

from pyshim.model.errors import InvalidArgument

ROOT_CLASS = "/"
"""The group that every process begins in."""
_ROOT_CLASSES = (ROOT_CLASS, "system/default")
"""Its names: OCI's, and that of goresctrl, which containerd and CRI-O read annotations with."""


def rdt_class(linux: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The class in a spec's `linux`, empty for none, and the names of its other members, which a VM ignores.

    Raises InvalidArgument for an invalid name.
    """
    wanted = linux.get("intelRdt")
    if wanted is None:
        return "", ()
    if not isinstance(wanted, Mapping):
        raise InvalidArgument(f"read linux.intelRdt: not an object: {str(wanted)[:100]!r}")
    name = wanted.get("closID") or ""
    if not isinstance(name, str):
        raise InvalidArgument(f"read linux.intelRdt.closID: not a name: {str(name)[:100]!r}")
    if name in _ROOT_CLASSES:
        name = ROOT_CLASS
    elif name in (".", "..") or "/" in name or not name.isprintable():
        raise InvalidArgument(f"read linux.intelRdt.closID: {name[:100]!r} is not a directory name")
    return name, tuple(sorted(key for key, value in wanted.items() if value and key != "closID"))
